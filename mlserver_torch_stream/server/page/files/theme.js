// Sets the colours that were chosen before, ahead of the first paint; else they are the system's.
// No module, because modules run after it.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("torch-stream-theme");
  } catch {
    // a browser that stores nothing: the system's colours
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
