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

// Returns whether this browser has a session, whether passwords open the page, and why a link did not.
export async function enter() {
  const secret = location.hash.slice(1);
  let refused = "";
  if (secret) {
    history.replaceState(null, "", "/");
    const { ok, said } = await post("/session", { link: secret });
    if (!ok) refused = said.error || "The link was refused.";
  }
  const { ok, said } = await get("/session");
  if (!ok) throw new Error("no answer");
  return { inside: said.inside, passwords: said.passwords, refused: said.inside ? "" : refused };
}

export async function enterWithPassword(name, password) {
  const { ok, said } = await post("/session", { name, password });
  return ok ? "" : said.error || "Refused.";
}

export const leave = () => asked("DELETE", "/session");
