// Server-sent events, read from a response's body: EventSource neither sends headers nor shows comments.

/** Yields {event, data} and, for lines that clients ignore, {comment}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith(":")) {
          yield { comment: line.slice(1).trim() };
        } else {
          const [, name, text] = /^([^:]*):? ?(.*)$/s.exec(line);
          if (name === "data") data.push(text);
          else if (name === "event") event = text;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
