// A browser gives up what it is loading when the network of its machine changes, as when containers start. A style that
// was lost is asked for again, and without its script the page is loaded again: the secret in its address is still there.
{
  const key = "coterie-loads", most = 8;
  const pause = (loads) => Math.min(250 * 2 ** loads, 4000);
  const lost = (file, loads) => {
    if (loads >= most) {
      sessionStorage.removeItem(key); // who loads the page again begins anew
      const said = document.getElementById("connection");
      if (said) said.textContent = "a file of this page does not load; load the page again";
    } else if (file.tagName === "SCRIPT") {
      sessionStorage.setItem(key, loads + 1);
      setTimeout(() => location.reload(), pause(loads));
    } else {
      const again = file.cloneNode();
      again.dataset.loads = loads + 1;
      setTimeout(() => file.replaceWith(again), pause(loads));
    }
  };
  addEventListener("error", ({ target }) => {
    if (target.tagName === "SCRIPT") lost(target, Number(sessionStorage.getItem(key)));
    else if (target.rel === "stylesheet") lost(target, Number(target.dataset.loads || 0));
  }, true);
  addEventListener("load", ({ target }) => target.tagName === "SCRIPT" && sessionStorage.removeItem(key), true);
}
