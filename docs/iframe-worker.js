// Workers for pages that are opened from disk, where browsers refuse scripts of workers: the script runs in a hidden
// frame instead. The search of the site needs it; the theme looks for the name IFrameWorker.
"use strict";
{
  const load = (frame, url) => new Promise((resolve, reject) => {
    const script = frame.document.createElement("script");
    script.src = new URL(url, document.baseURI);
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${script.src} cannot be loaded`));
    frame.document.body.append(script);
  });

  class IFrameWorker extends EventTarget {
    #element = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#element.hidden = true;
      document.body.append(this.#element);
      const frame = this.#element.contentWindow;
      frame.document.open();
      frame.document.write("<!doctype html><body></body>");
      frame.document.close();
      frame.postMessage = data => this.#tell(new MessageEvent("message", { data: structuredClone(data) }));
      frame.importScripts = (...urls) => urls.reduce((before, x) => before.then(() => load(frame, x)), Promise.resolve());
      frame.addEventListener("error", e => this.#tell(new ErrorEvent("error", { message: e.message, error: e.error })));
      this.#ready = load(frame, url).catch(error => this.#tell(new ErrorEvent("error", { message: error.message, error })));
    }

    #tell(event) {
      this.dispatchEvent(event);
      this[`on${event.type}`]?.(event);
    }

    postMessage(data) {
      const event = new MessageEvent("message", { data: structuredClone(data) });
      this.#ready.then(() => this.#element.contentWindow?.dispatchEvent(event));
    }

    terminate() {
      this.#element.remove();
    }
  }

  window.IFrameWorker = IFrameWorker;
  if (location.protocol === "file:") window.Worker = IFrameWorker;
}
