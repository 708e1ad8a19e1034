"use strict";
// Only comfort: everything can be read, printed and copied by hand without it.
const said = document.querySelector(".said");

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

for (const code of document.querySelectorAll("code.copy")) {
  const text = code.textContent;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy-button";
  button.textContent = said.dataset.copy;
  button.setAttribute("aria-label", `${said.dataset.copy}: ${text}`);
  button.addEventListener("click", async () => {
    await copy(text);
    button.textContent = said.dataset.copied;
    said.textContent = `${said.dataset.copied}: ${text}`;
    setTimeout(() => { button.textContent = said.dataset.copy; }, 1500);
  });
  code.after(" ", button);
}

const closed = new Set();
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    closed.add(details);
    details.open = true;
  }
});
addEventListener("afterprint", () => {
  for (const details of closed) details.open = false;
  closed.clear();
});
