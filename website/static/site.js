// Names and keyboard focus for parts that the theme makes by script and leaves without.
function describe() {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav, number) => {
    nav.setAttribute("aria-label", `Code block ${number + 1}`);
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex]), .md-typeset pre > code:not([tabindex])").forEach((part) => {
    part.setAttribute("tabindex", "0");
  });
}
new MutationObserver(describe).observe(document.body, { childList: true, subtree: true });
describe();
