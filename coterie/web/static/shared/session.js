// The way in: the secret in the address's fragment, or a name and password, become a cookie that no script can read.

async function asked(method, path, body) {
  const answer = await fetch(path, {
    method,
    cache: "no-store",
    credentials: "same-origin",
    headers: body === undefined ? {} : { "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // An answer without a body.
  }
  return { ok: answer.ok, status: answer.status, said };
}

export const post = (path, body = {}) => asked("POST", path, body);
export const get = (path) => asked("GET", path);

// A change of this machine's network takes the answers of requests that were on their way: these are sent again.
async function patiently(ask) {
  for (let wait = 250; ; wait *= 2) {
    try {
      return await ask();
    } catch (error) {
      if (wait > 2000) throw error;
      await new Promise((over) => setTimeout(over, wait));
    }
  }
}

// Returns whether this browser has a session, whether passwords open the page, and why a link did not.
export async function enter() {
  const secret = location.hash.slice(1);
  let refused = "";
  if (secret) {
    history.replaceState(null, "", "/");
    // A link is used once; the same attempt may use it again, as the answer to the first request may be what was lost.
    const attempt = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const { ok, said } = await patiently(() => post("/session", { link: secret, attempt }));
    if (!ok) refused = said.error || "The link was refused.";
  }
  const { ok, said } = await patiently(() => get("/session"));
  if (!ok) throw new Error("no answer");
  return { inside: said.inside, passwords: said.passwords, refused: said.inside ? "" : refused };
}

export async function enterWithPassword(name, password) {
  const { ok, said } = await post("/session", { name, password });
  return ok ? "" : said.error || "Refused.";
}

export const leave = () => asked("DELETE", "/session");
