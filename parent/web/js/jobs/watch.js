// Reads one job's events into a record for as long as somebody looks, and goes on behind the last one seen when
// the connection breaks.

import { useEffect, useMemo, useState } from "../lib.js";
import { apiKey, needsKey } from "../core/api.js";
import { connection } from "../core/live.js";
import { listenTo } from "../core/sse.js";
import { Record } from "./record.js";

// Faster than this nobody reads, and each drawing is a frame; an old job's log comes as fast as it can be sent.
const DRAW_MS = 150;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;

/** {seen, fault}: the job's record as it is now, another one as it grows; fault: why nothing comes, or empty. */
export function useRecord(id) {
  const record = useMemo(() => new Record(), [id]);
  const [fault, setFault] = useState("");
  const [seen, setSeen] = useState(() => record.view());
  // A tab that nobody looks at lets go of this connection as it does of the page's own.
  const isOff = connection.value.state === "paused" || needsKey.value;
  useEffect(() => {
    if (isOff) return undefined;
    const stop = new AbortController();
    let timer = 0;
    const changed = () => {
      timer ||= setTimeout(() => {
        timer = 0;
        setSeen(record.view());
      }, DRAW_MS);
    };
    watch(id, record, { changed, fault: setFault }, stop.signal);
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [id, record, isOff, apiKey.value]);
  return { seen, fault };
}

/** Fill the record until the job has ended. tell: {changed(), fault(text)} */
async function watch(id, record, tell, abort) {
  let delay = FIRST_RETRY_MS;
  while (!record.end && !abort.aborted) {
    let reason = "";
    try {
      for await (const event of listenTo(`api/jobs/${encodeURIComponent(id)}/events?offset=${record.offset}`, abort)) {
        delay = FIRST_RETRY_MS;
        tell.fault("");
        if (event !== null && record.take(Number(event.id), JSON.parse(event.data))) tell.changed();
        if (record.end) break;
      }
    } catch (err) {
      reason = err.message;
      if (err.status === 404 || err.status === 401) delay = Infinity;
      // Behind the end of the log: it is another one than it was.
      if (err.status === 400 && record.offset > 0) record.clear();
    }
    if (abort.aborted || record.end) return;
    tell.fault(reason);
    if (delay === Infinity) return;
    await sleep(delay * (0.8 + 0.4 * Math.random()), abort);
    delay = Math.min(delay * 2, LAST_RETRY_MS);
  }
}

function sleep(ms, abort) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    abort.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
