// Each key presses the button, or follows the link, that states it; not while somebody writes.
document.addEventListener("keydown", (event) => {
  const isWriting = event.target.closest("input, textarea, select");
  if (isWriting || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  document.querySelector(`[data-key="${CSS.escape(event.key)}"]`)?.click();
});
