"use strict";
// Chooses the layer whose slots colour the tokens, and names the slot under the pointer. Without it the page shows the majority.
const layer = document.getElementById("layer");
const names = [...document.querySelectorAll("[data-slot]")].map((item) => item.dataset.slot);
const views = [...document.querySelectorAll(".tokens")].map((view) => ({
  tokens: view.querySelectorAll("i"),
  layers: view.dataset.layers.split(" "),
}));
const slotOf = (digit) => parseInt(digit, 36);

function colour() {
  for (const { tokens, layers } of views) {
    const digits = layers[layer.value];
    tokens.forEach((token, t) => {
      token.className = "s" + slotOf(digits[t]) + (token.classList.contains("o") ? " o" : "");
    });
  }
}

if (layer) {
  layer.closest("[hidden]").hidden = false;
  layer.addEventListener("change", colour);
  document.addEventListener("pointerover", ({ target }) => {
    if (target.matches?.(".tokens i")) target.title = names[slotOf(target.className.slice(1).split(" ")[0])] ?? "";
  });
}
