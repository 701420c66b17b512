// Asks for the API key, when the server does.

import { key, whenKeyIsNeeded } from "./api.js";
import { byId } from "./dom.js";

let asking = null;

/** `forgotten`: called when there is no key any more. */
export function installKeyDialog(forgotten) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  const showForget = () => (byId("forget-key").hidden = !key.get());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(field.value.trim());
    dialog.close();
  });
  byId("forget-key").addEventListener("click", () => {
    key.forget();
    showForget();
    forgotten();
  });
  showForget();
  whenKeyIsNeeded((wrong) => {
    byId("key-error").textContent = wrong ? "The server did not take this key." : "";
    asking ??= new Promise((resolve) => {
      const before = key.get();
      field.value = "";
      dialog.addEventListener(
        "close",
        () => {
          asking = null;
          showForget();
          resolve(key.get() !== before);
        },
        { once: true },
      );
      dialog.showModal();
    });
    return asking;
  });
}
