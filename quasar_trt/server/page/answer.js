// An answer that grows: a span for each token, and figures about drafting and speed.
export class Answer {
  constructor(paragraph) {
    this.paragraph = paragraph;
    this.characters = []; // code points, as the server counts them
    this.offsets = [];
    this.origins = [];
    this.numAccepted = 0;
    this.usage = null;
    this.began = null; // when the first tokens came, which cost the prompt's pass too
    this.numFirst = 0;
  }

  get text() {
    return this.characters.join("");
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.characters.push(...(choice.delta.content ?? ""));
    this.offsets.push(...choice.text_offsets);
    this.origins.push(...choice.token_origins);
    this.numAccepted += choice.token_origins.filter((origin) => origin === "accepted").length;
    if (this.began === null) {
      this.began = performance.now();
      this.numFirst = this.offsets.length;
    }
    this.ended = performance.now();
  }

  draw() {
    const spans = this.paragraph.children;
    // The last span may have grown; those before it are complete.
    for (let i = Math.max(spans.length - 1, 0); i < this.offsets.length; i++) {
      const span = spans[i] ?? this.paragraph.appendChild(document.createElement("span"));
      span.className = this.origins[i];
      span.textContent = this.characters.slice(this.offsets[i], this.offsets[i + 1]).join("");
    }
  }

  figures() {
    const numTokens = this.offsets.length;
    if (!numTokens) return "";
    const numPasses = Math.max(numTokens - this.numAccepted, 1); // each emits one token besides those that it accepts
    const parts = [
      `${numTokens} tokens`,
      `${this.numAccepted} accepted`,
      `mean acceptance length ${(numTokens / numPasses).toFixed(2)}`,
    ];
    const seconds = (this.ended - this.began) / 1000;
    if (seconds > 0) parts.push(`${((numTokens - this.numFirst) / seconds).toFixed(1)} tokens/s`);
    if (this.usage?.speculation.num_draft_tokens) {
      const { num_accepted_tokens: accepted, num_draft_tokens: drafted } = this.usage.speculation;
      parts.push(`draft acceptance ${(accepted / drafted).toFixed(3)} (${accepted} of ${drafted})`);
    }
    return parts.join(", ");
  }
}
