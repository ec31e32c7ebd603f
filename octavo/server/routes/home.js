"use strict";
const byId = (id) => document.getElementById(id);
const log = byId("log"), prompt = byId("prompt");

/* An element with its properties and children; texts become text, never markup: answers are anybody's words. */
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// This tab alone keeps the key, until it is closed; a browser that keeps nothing throws at the mere mention.
const KEY = "octavo-api-key", kept = (() => { try { return sessionStorage; } catch { return null; } })();
let key = kept?.getItem(KEY);
let conversation = []; // the messages so far; another list after "New chat"
let files = []; // data URLs of those that go with the next message
let running = null; // the AbortController of the answer that is coming

/* A request to this server, with the key if there is one. A 401 brings up the field for it. */
async function ask(path, options = {}) {
  const headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
  const response = await fetch(path, {...options, headers});
  if (response.ok) return response;
  const complaint = await complaintOf(response);
  if (response.status === 401) {
    byId("locked").textContent = complaint;
    byId("unlock").hidden = false;
    byId("key").focus();
  }
  throw new Error(complaint);
}

function showState(text, kind) {
  const state = byId("state");
  if (state.textContent === text) return; // a screen reader reads every change aloud
  state.textContent = text;
  state.className = kind;
}

async function checkHealth() {
  try {
    const response = await fetch("health");
    showState(response.ok ? "ready" : await complaintOf(response), response.ok ? "good" : "bad");
  } catch {
    showState("the server can't be reached", "bad");
  }
}

async function loadModel() {
  const {data: [model]} = await (await ask("v1/models")).json();
  document.body.dataset.model = byId("model").textContent = model.id;
  byId("model").title = `context of ${model.max_model_len.toLocaleString("en")} tokens`;
}

/* Lets `change` make the conversation longer, and scrolls along if the end was in sight. */
function follow(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

const dataOf = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

/* Attaches those files that the model reads. */
async function attach(files) {
  const known = byId("files").accept.split(",");
  const read = await Promise.all([...files].filter((file) => known.includes(file.type)).map(dataOf));
  showAttached([...files, ...read]);
}

/* An image, or a player of a video or of audio. */
function shownFile(data, label) {
  const kind = kindOf(data);
  if (kind === "image") return make("img", {src: data, alt: label});
  const player = make(kind, {src: data, controls: true});
  player.setAttribute("aria-label", label);
  return player;
}

function showAttached(list) {
  files = list;
  byId("attached").hidden = !files.length;
  byId("attached").replaceChildren(...files.map((data, place) => {
    const label = `Attached ${kindOf(data)} ${place + 1}`;
    return make("span", {}, shownFile(data, label), make("button", {
      type: "button", className: "quiet", title: "Remove this", textContent: "×", ariaLabel: `Remove: ${label}`,
      onclick: () => showAttached(files.filter((_, other) => other !== place)),
    }));
  }));
}

function requestBody(messages) {
  const system = byId("system").value;
  const body = {
    model: document.body.dataset.model,
    messages: [...(system.trim() ? [{role: "system", content: system}] : []), ...messages],
    stream: true,
    stream_options: {include_usage: true},
  };
  for (const name of ["temperature", "max_tokens"])
    if (byId(name).value !== "") body[name] = Number(byId(name).value);
  return body;
}

/* The place of an answer on the page; reasoning gets one, folded away, when there is any. */
function makeAnswer() {
  const content = document.createTextNode(""), thought = document.createTextNode("");
  const reasoning = make("details", {className: "reasoning", hidden: true},
    make("summary", {}, "Reasoning"), make("p", {}, thought));
  const stats = make("div", {className: "stats"}, "…");
  const turn = make("article", {className: "turn"}, reasoning, make("p", {}, content), stats);
  turn.setAttribute("aria-label", "Answer");
  return {turn, content, thought, reasoning, stats};
}

/* Reads an answer into its place. `seen` is filled as it comes, so that it holds what there was if this throws. */
async function readAnswer(response, answer, seen) {
  for await (const {choices: [choice], usage} of chunksOf(response)) {
    if (usage) seen.usage = usage;
    if (!choice) continue;
    const {content, reasoning_content, reasoning} = choice.delta;
    const thought = reasoning_content ?? reasoning;
    if (content || thought) {
      seen.last = performance.now();
      seen.first ??= seen.last;
    }
    follow(() => {
      if (thought) answer.reasoning.hidden = false;
      answer.thought.appendData(thought || "");
      answer.content.appendData(content || "");
    });
    if (choice.finish_reason) seen.finish = choice.finish_reason;
  }
}

/* "40 tokens · 35.1 tokens/s · first token after 0.21 s"; the rate is that of the tokens after the first. */
function statsOf({started, first, last, usage, finish}) {
  const tokens = usage?.completion_tokens;
  return [
    tokens !== undefined && `${tokens} token${tokens === 1 ? "" : "s"}`,
    tokens > 1 && last > first && `${((tokens - 1) / (last - first) * 1000).toFixed(1)} tokens/s`,
    first && `first token after ${((first - started) / 1000).toFixed(2)} s`,
    finish === "length" && "ended at the limit of tokens",
    finish === "repetition" && "ended because it repeated itself",
    finish === "abort" && "ended by the server",
  ].filter(Boolean).join(" · ");
}

function setBusy(controller) {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  log.setAttribute("aria-busy", Boolean(controller)); // an answer is read aloud once it is whole
}

async function send() {
  const text = prompt.value, shown = files, turns = conversation, controller = new AbortController();
  const said = make("article", {className: "turn user"},
    ...shown.map((data) => shownFile(data, `Attached ${kindOf(data)}`)), make("p", {}, text));
  said.setAttribute("aria-label", "You");
  const answer = makeAnswer(), seen = {started: performance.now()};
  let problem = "";
  prompt.value = "";
  showAttached([]);
  log.append(said, answer.turn);
  log.scrollTop = log.scrollHeight;
  turns.push({role: "user", content: contentOf(text, shown)});
  setBusy(controller);
  try {
    const body = JSON.stringify(requestBody(turns));
    await readAnswer(
      await ask("v1/chat/completions", {method: "POST", body, signal: controller.signal}), answer, seen);
  } catch (error) {
    problem = controller.signal.aborted ? "stopped" : error.message;
    checkHealth();
  }
  if (turns !== conversation) return; // a new chat has begun meanwhile
  setBusy(null);
  follow(() => {
    answer.stats.textContent = [statsOf(seen), problem].filter(Boolean).join(" · ");
    answer.stats.classList.toggle("bad", Boolean(problem) && problem !== "stopped");
  });
  if (answer.content.data || !problem) {
    turns.push({role: "assistant", content: answer.content.data});
  } else { // nothing was answered: the question is not part of the conversation, and can be sent again
    turns.pop();
    prompt.value ||= text;
    if (!files.length) showAttached(shown);
  }
}

function newChat() {
  running?.abort();
  conversation = [];
  setBusy(null);
  showAttached([]);
  log.querySelectorAll(".turn").forEach((turn) => turn.remove());
  prompt.focus();
}

byId("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && (prompt.value.trim() || files.length)) send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("compose").requestSubmit();
});
byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", async () => {
  await attach(byId("files").files);
  byId("files").value = ""; // so that the same file can be chosen again
  prompt.focus();
});
prompt.addEventListener("paste", (event) => {
  if (byId("attach").hidden || !event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
for (const happening of ["dragover", "drop"])
  document.addEventListener(happening, (event) => {
    if (byId("attach").hidden || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (happening === "drop") attach(event.dataTransfer.files);
  });
byId("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
byId("new").addEventListener("click", newChat);
// A field that the browser objects to must be in sight for it to say so.
byId("settings").addEventListener("invalid", () => { byId("settings").open = true; }, true);
byId("unlock").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = byId("key").value;
  try {
    await loadModel();
  } catch (error) {
    byId("locked").textContent = error.message;
    byId("locked").className = "bad";
    byId("key").select();
    return;
  }
  kept?.setItem(KEY, key);
  byId("key").value = "";
  byId("unlock").hidden = true;
  prompt.focus();
});

checkHealth();
if (!byId("compose").hidden)
  loadModel().catch(() => {}); // the page has a name already; what is wrong, the state or the field for the key says
setInterval(() => document.hidden || checkHealth(), 10000);
