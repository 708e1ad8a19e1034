// Opens a page in Chromium as a reader does and prints one JSON document with what was seen.
// node look.js CHROMIUM PAGE FOLDER_FOR_SCREENSHOTS; needs playwright-core and axe-core where node finds them.
"use strict";
const fs = require("fs");
const path = require("path");
const { pathToFileURL } = require("url");
const { chromium } = require("playwright-core");

const AXE = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const [executablePath, page, folder] = process.argv.slice(2);
const address = pathToFileURL(path.resolve(page)).href;

async function look(browser, width, colorScheme) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme });
  const tab = await context.newPage();
  const seen = { width, colorScheme, requests: [], complaints: [] };
  tab.on("request", (request) => { if (request.url() !== address) seen.requests.push(request.url()); });
  tab.on("console", (message) => seen.complaints.push(message.text()));
  tab.on("pageerror", (error) => seen.complaints.push(String(error)));
  tab.on("dialog", (dialog) => { seen.complaints.push("dialog"); dialog.dismiss(); });
  await tab.goto(address);
  await tab.evaluate(() => { for (const one of document.querySelectorAll("details")) one.open = true; });
  seen.scrollWidth = await tab.evaluate(() => document.documentElement.scrollWidth);
  seen.ground = await tab.evaluate(() => getComputedStyle(document.body).backgroundColor);
  await tab.screenshot({ path: path.join(folder, `${width}-${colorScheme}.png`), fullPage: true });
  await tab.evaluate(AXE);
  const found = await tab.evaluate(() => axe.run());
  seen.faults = found.violations.map((fault) => `${fault.impact} ${fault.id}: ${fault.nodes[0].html.slice(0, 200)}`);
  seen.rulesPassed = found.passes.length;
  await context.close();
  return seen;
}

async function copy(browser) {
  const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"] });
  const tab = await context.newPage();
  await tab.goto(address);
  const text = await tab.evaluate(() => document.querySelector("code.copy")?.textContent ?? null);
  const seen = { text };
  if (text !== null) {
    // with the keyboard alone: Tab until the first copy button has the focus
    for (let step = 0; step < 50; step += 1) {
      await tab.keyboard.press("Tab");
      if (await tab.evaluate(() => document.activeElement.className === "copy-button")) break;
    }
    await tab.keyboard.press("Enter");
    await tab.waitForFunction(() => document.querySelector(".said").textContent !== "");
    seen.said = await tab.evaluate(() => document.querySelector(".said").textContent);
    seen.copied = await tab.evaluate(() => navigator.clipboard.readText());
  }
  await context.close();
  return seen;
}

async function withoutScripts(browser) {
  const context = await browser.newContext({ javaScriptEnabled: false });
  const tab = await context.newPage();
  await tab.goto(address);
  const seen = { text: await tab.innerText("body"), buttons: await tab.locator("button").count() };
  await context.close();
  return seen;
}

(async () => {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    const looks = [];
    for (const width of [1280, 390]) {
      for (const scheme of ["light", "dark"]) looks.push(await look(browser, width, scheme));
    }
    console.log(JSON.stringify({ looks, copy: await copy(browser), plain: await withoutScripts(browser) }));
  } finally {
    await browser.close();
  }
})();
