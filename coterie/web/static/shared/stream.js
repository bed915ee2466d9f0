// The parts of a page as they change. A browser that slept asks for what changed since the last part that it had.

const SILENT_MS = 40000;
const FIRST_MS = 10000;
const LATEST_MS = 15000;
const ANSWER_MS = 5000;

export class Stream {
  // `changed` receives the parts that changed; `told` the state: "open", "lost", "ended" or "outside".
  constructor(changed, told) {
    this.changed = changed;
    this.told = told;
    this.mark = "";
    this.over = false;
    this.wait = 500;
    this.source = null;
    this.timer = 0;
    this.watch = setInterval(() => this.check(), 5000);
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    window.addEventListener("online", () => this.check());
    this.connect();
  }

  connect() {
    clearTimeout(this.timer);
    this.source?.close();
    this.heard = Date.now();
    this.limit = FIRST_MS;
    const source = new EventSource(`/events?after=${encodeURIComponent(this.mark)}`);
    this.source = source;
    source.onmessage = (event) => {
      this.heard = Date.now();
      this.wait = 500;
      this.limit = SILENT_MS;
      this.mark = event.lastEventId;
      this.told("open");
      this.changed(JSON.parse(event.data));
    };
    source.addEventListener("beat", () => {
      this.heard = Date.now();
    });
    source.addEventListener("end", () => this.stop("ended"));
    source.onerror = () => {
      source.close();
      if (source === this.source && !this.over) this.retry();
    };
  }

  // A computer that slept has a connection that only looks alive.
  check() {
    if (!this.over && Date.now() - this.heard > this.limit) this.retry();
  }

  retry() {
    this.source?.close();
    this.source = null;
    this.heard = Date.now();
    this.limit = SILENT_MS;
    this.told("lost");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.again(), this.wait);
    this.wait = Math.min(this.wait * 2, LATEST_MS);
  }

  async again() {
    try {
      // The browser may keep further connections that only look alive: each that does not answer is given up.
      const signal = AbortSignal.timeout(ANSWER_MS);
      const answer = await fetch("/session", { cache: "no-store", credentials: "same-origin", signal });
      if (answer.ok && !(await answer.json()).inside) return this.stop("outside");
    } catch {
      return this.retry();
    }
    return this.connect();
  }

  stop(state) {
    this.over = true;
    clearInterval(this.watch);
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    this.told(state);
  }
}
