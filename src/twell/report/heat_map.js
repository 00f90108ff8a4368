// Shows what a token woke, when it is pointed at, focused or tapped; arrow keys go from token to token.
for (const heat of document.querySelectorAll(".heat")) {
  const data = JSON.parse(heat.querySelector("script").textContent);
  const tokens = [...heat.querySelectorAll(".tokens button")];
  const woken = heat.querySelector(".woken");
  let chosen = -1;

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // Marks the tokens for which a neuron of a layer is among the strongest, too.
  const mark = (layer, neuron) => {
    tokens.forEach((token, place) =>
      token.classList.toggle("same", neuron !== null && data.neurons[layer][place].includes(neuron)));
  };

  const neuronChip = (layer, neuron, value) => {
    const chip = element("button", "neuron", `${neuron}: ${value > 0 ? "+" : ""}${value}`);
    chip.type = "button";
    chip.title = "Mark the tokens that wake this neuron, too";
    chip.setAttribute("aria-pressed", "false");
    chip.addEventListener("pointerenter", () => mark(layer, neuron));
    chip.addEventListener("focus", () => mark(layer, neuron));
    chip.addEventListener("click", () => {
      for (const other of woken.querySelectorAll(".neuron")) other.setAttribute("aria-pressed", String(other === chip));
      mark(layer, neuron);
    });
    return chip;
  };

  const show = (place) => {
    if (place === chosen) return;
    if (chosen >= 0) {
      tokens[chosen].setAttribute("aria-pressed", "false");
      tokens[chosen].tabIndex = -1;
    }
    chosen = place;
    tokens[place].setAttribute("aria-pressed", "true");
    tokens[place].tabIndex = 0;
    mark(0, null);
    const title = element("h3");
    title.append("“", element("bdi", "", tokens[place].querySelector("bdi").textContent), "”");
    const total = data.nnz.reduce((sum, layer) => sum + layer[place], 0);
    const words = `Token ${place + 1} of ${tokens.length}, number ${data.tokens[place]} of the vocabulary: ` +
      `${total.toLocaleString("en")} active neurons in ${data.nnz.length} layers.`;
    const layers = element("ol");
    data.nnz.forEach((layer, number) => {
      const item = element("li");
      const count = element("div", "count");
      count.append(element("span", "", `layer ${number}`),
        element("span", "", `${layer[place].toLocaleString("en")} of ${data.sizes[number].toLocaleString("en")}`));
      const bar = element("div", "bar");
      const filled = element("b");
      filled.style.width = `${100 * layer[place] / Math.max(...layer, 1)}%`;
      bar.append(filled);
      item.append(count, bar);
      data.neurons[number][place].forEach((neuron, rank) =>
        item.append(neuronChip(number, neuron, data.values[number][place][rank])));
      layers.append(item);
    });
    woken.replaceChildren(title, element("p", "quiet", words), layers,
      element("p", "quiet", "Bars: against the most of any token here. Neurons: those with the largest hidden values."));
    woken.scrollTop = 0;
  };

  const placeOf = (event) => tokens.indexOf(event.target.closest(".tokens button"));
  const react = (event) => {
    const place = placeOf(event);
    if (place >= 0) show(place);
  };
  const text = heat.querySelector(".tokens");
  // A finger scrolls over tokens: it has to tap.
  text.addEventListener("pointerover", (event) => { if (event.pointerType !== "touch") react(event); });
  text.addEventListener("focusin", react);
  text.addEventListener("click", react);
  text.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const next = event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : placeOf(event) + (steps[event.key] ?? NaN);
    if (tokens[next]) {
      event.preventDefault();
      tokens[next].focus();
    }
  });
  show(Number(heat.dataset.first));
}
