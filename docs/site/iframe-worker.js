// A browser starts no worker for a page that was opened from a folder, so the search of the
// theme runs in a hidden frame there. The offline plugin of MkDocs Material asks for such a
// file by this name, and would load one from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><body></body>"; // loads later, so that the listener hears it in each browser
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", () => this.run(url, resolve)));
      document.body.append(this.frame);
    }

    run(url, resolve) {
      const script = this.frame.contentDocument.createElement("script");
      this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      script.addEventListener("load", resolve);
      script.src = url;
      this.frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
