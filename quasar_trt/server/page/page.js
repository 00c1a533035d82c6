// A conversation with the model, its tokens coloured by where they came from.

import { Answer } from "./answer.js";
import { events } from "./events.js";

const element = (id) => document.getElementById(id);
const conversation = element("conversation");
let messages = [];
let stopping = null; // aborts the answer that streams

function headers() {
  const key = element("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  return new Error(body.error?.message ?? `HTTP status ${response.status}`);
}

function addParagraph(className, text = "") {
  const paragraph = document.createElement("p");
  paragraph.className = className;
  paragraph.textContent = text;
  conversation.append(paragraph);
  conversation.scrollTop = conversation.scrollHeight;
  return paragraph;
}

async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    element("figures").textContent = (await failure(response)).message;
    return;
  }
  const model = (await response.json()).data[0];
  document.title = element("model").textContent = model.id;
  const names = new Set([model.drafter, "none"]);
  element("drafter").replaceChildren(...[...names].map((name) => new Option(name)));
  element("figures").textContent = "";
}

function request() {
  return {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    temperature: element("temperature").valueAsNumber,
    max_tokens: element("max-tokens").valueAsNumber,
    ...(element("drafter").value && { drafter: element("drafter").value }),
  };
}

async function stream(answer, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(request()),
    signal,
  });
  if (!response.ok) throw await failure(response);
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    answer.add(chunk);
    show(answer);
  }
}

let frame = null; // that is asked for: tokens may come faster than they can be drawn

function show(answer) {
  frame ??= requestAnimationFrame(() => {
    frame = null;
    draw(answer);
  });
}

function draw(answer) {
  if (!answer.paragraph.isConnected) return; // its conversation was left
  answer.draw();
  element("figures").textContent = answer.figures();
  conversation.scrollTop = conversation.scrollHeight;
}

async function send(text) {
  const own = messages; // a new conversation may begin meanwhile
  addParagraph("user", text);
  own.push({ role: "user", content: text });
  const answer = new Answer(addParagraph("assistant"));
  stopping = new AbortController();
  setBusy(true);
  try {
    await stream(answer, stopping.signal);
  } catch (error) {
    if (error.name !== "AbortError") addParagraph("failure", error.message);
  }
  draw(answer);
  if (answer.text) own.push({ role: "assistant", content: answer.text });
  else own.pop();
  setBusy(false);
}

function setBusy(busy) {
  document.body.dataset.state = busy ? "busy" : "idle";
  element("send").disabled = busy;
  element("stop").disabled = !busy;
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("message").value.trim();
  if (!text || element("send").disabled) return;
  element("message").value = "";
  send(text);
});

element("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("form").requestSubmit();
  }
});

element("stop").addEventListener("click", () => stopping?.abort());

element("reset").addEventListener("click", () => {
  stopping?.abort();
  messages = [];
  conversation.replaceChildren();
  element("figures").textContent = "";
});

element("key").addEventListener("change", showModel);
setBusy(false);
showModel();
