// SPDX-License-Identifier: BSD-3-Clause
// A page that was opened from a folder may not start a worker. The theme's search is one: this runs
// its script in a hidden frame of the same page instead, whose messages go through these methods.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    const base = new URL(url, document.baseURI);
    const load = (source) => new Promise((resolve, reject) => {
      const script = this.inside.document.createElement("script");
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${source} cannot be read`));
      script.src = new URL(source, base);
      this.inside.document.head.append(script);
    });
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.inside.importScripts = async (...sources) => {
      for (const source of sources) await load(source);
    };
    this.ready = load(base);
  }

  async postMessage(data) {
    await this.ready;
    this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
  }

  terminate() {
    this.inside.frameElement.remove();
  }
}
window.IFrameWorker = IFrameWorker;
if (location.protocol === "file:") window.Worker = IFrameWorker;
