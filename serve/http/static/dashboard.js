// Live numbers of the engine, once a second.

const $ = (id) => document.getElementById(id);
const SECONDS = 120;

export function startDashboard(ask) {
  const rates = [];
  let before = null; // tokens so far and when that was read

  async function update() {
    try {
      const info = await (await ask("server_info")).json();
      $("status").textContent = info.draining ? "shutting down" : `up ${duration(info.uptime_seconds)}`;
      $("status").className = "";
      $("model").textContent = info.model;
      draw(info);
    } catch (error) {
      $("status").textContent = error.message;
      $("status").className = "error";
    }
    setTimeout(update, 1000);
  }

  function draw({ engine, http }) {
    $("running").textContent = engine.num_running_reqs ?? http.active;
    $("waiting").textContent = engine.num_queue_reqs ?? "–";
    $("hits").textContent = engine.cache_hit_rate === undefined ? "–" : `${(100 * engine.cache_hit_rate).toFixed(0)} %`;
    const now = { tokens: http.generation_tokens_total, at: performance.now() };
    const rate = before ? Math.max(0, (1000 * (now.tokens - before.tokens)) / (now.at - before.at)) : 0;
    before = now;
    $("rate").textContent = rate < 10 ? rate.toFixed(1) : rate.toFixed(0);
    rates.push(rate);
    if (rates.length > SECONDS) rates.shift();
    const top = Math.max(1, ...rates);
    const points = rates.map((value, i) => `${SECONDS - rates.length + i + 1},${(39 - (38 * value) / top).toFixed(2)}`);
    $("line").setAttribute("points", points.join(" "));
    if (engine.pool) drawPool(engine.pool);
  }

  update();
}

/** State grows from the left, pages from the right; what is between is free for either. */
function drawPool({ bytes, state_bytes: state, page_bytes: page }) {
  const gap = Math.max(0, bytes - state - page);
  for (const [name, value] of [["state", state], ["gap", gap], ["page", page]]) {
    $(`pool-${name}`).style.flexGrow = value;
    $(`${name}-text`).textContent = `${size(value)} (${((100 * value) / (bytes || 1)).toFixed(1)} %)`;
  }
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit++;
  }
  return `${bytes.toFixed(unit && bytes < 10 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${seconds.toFixed(0)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
