// Chat and dashboard. Everything that comes from the model or the server is set as text, never as HTML.

import { startChat } from "./chat.js";
import { startDashboard } from "./dashboard.js";

const key = document.getElementById("key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("change", () => sessionStorage.setItem("key", key.value));

/** fetch with the key; an error answer becomes an Error with the server's sentence. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error(body.error?.message ?? `status ${response.status}`);
  }
  return response;
}

startChat(ask);
startDashboard(ask);
