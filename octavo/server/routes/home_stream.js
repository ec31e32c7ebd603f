"use strict";

/* The data of the complete events in `text`, and the beginning of an event that is left, for more text to be put behind.
   Lines may end with LF, CR or both; a CR at the very end may be half of one. Comments and other fields are passed over. */
function takeEvents(text) {
  const blocks = text.split(/(?:\r\n|\n|\r(?!\n|$)){2}/);
  const rest = blocks.pop();
  const events = blocks
    .map((block) => block.split(/\r\n|\n|\r/).filter((line) => line.startsWith("data:")))
    .filter((lines) => lines.length)
    .map((lines) => lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n"));
  return {events, rest};
}

/* The JSON of each event of a response, up to [DONE]. Throws what an error event says, and if the end is missing. */
async function* chunksOf(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const {events, rest} = takeEvents(text + decoder.decode(value, {stream: true}));
    text = rest;
    for (const data of events) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/* What a response that is no success says: the message of its error object, or else its text. */
async function complaintOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText} ${text.slice(0, 500)}`.trim();
  }
}

/* What a data URL has: "image", "video" or "audio". */
const kindOf = (data) => data.slice("data:".length, data.indexOf("/"));

/* The content of a message: a text, or files as data URLs and then the text, if there is any. */
function contentOf(text, files) {
  if (!files.length) return text;
  const parts = files.map((data) => ({type: `${kindOf(data)}_url`, [`${kindOf(data)}_url`]: {url: data}}));
  return text.trim() ? [...parts, {type: "text", text}] : parts;
}
