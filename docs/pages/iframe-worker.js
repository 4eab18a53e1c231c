// The search of the theme runs in a worker, which browsers refuse to pages that are opened from disk. There, the worker's
// script runs in a hidden frame. The file's name keeps the plugin `offline` from linking a script of another site.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inner = frame.contentWindow;
    this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.loaded = new Promise((resolve) => {
      const script = this.inner.document.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = resolve;
      this.inner.document.body.append(script);
    });
  }

  postMessage(data) {
    this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
