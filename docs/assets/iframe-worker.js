// Search from disk: browsers start no worker from file://, so a hidden frame does its work. The
// theme's own replacement is fetched from another host, and this site refers to none.
if (location.protocol === "file:") {
  const load = (page, url) =>
    new Promise((done, failed) => {
      const script = page.createElement("script")
      script.src = url
      script.onload = done
      script.onerror = failed
      page.body.append(script)
    })

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => {
        const answer = new MessageEvent("message", { data })
        this.dispatchEvent(answer)
        if (this.onmessage) this.onmessage(answer)
      }
      inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => load(inside.document, next)), Promise.resolve())
      this.ready = load(inside.document, url)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
