// The web page in headless Chromium: node page.mjs http://127.0.0.1:PORT/ [folder for screenshots]
// Needs the package playwright-core beside it and a Chromium (CHROMIUM names it; /usr/bin/chromium otherwise).
import { chromium } from "playwright-core";

const [url, folder] = process.argv.slice(2);
let passed = 0, failed = 0;
const check = (name, good, seen = "") => {
  if (good) passed += 1;
  else { failed += 1; console.error(`page: ${name}: ${seen}`); }
};
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ["--no-sandbox"] });
const wide = { width: 1280, height: 800 }, phone = { width: 390, height: 844 };

async function open(colorScheme, viewport) {
  const page = await browser.newPage({ viewport, colorScheme, hasTouch: viewport === phone });
  page.seen = new Set();
  page.problems = [];
  page.on("request", request => page.seen.add(new URL(request.url()).origin));
  page.on("console", message => { if (message.type() === "error") page.problems.push(message.text()); });
  page.on("pageerror", error => page.problems.push(String(error)));
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("state").textContent === "ready");
  return page;
}

const answered = (page, count) =>
  page.waitForFunction(wanted => document.querySelectorAll(".assistant:not([aria-busy])").length === wanted, count, { timeout: 60000 });

for (const [name, scheme, viewport] of [["light", "light", wide], ["dark", "dark", wide], ["phone-light", "light", phone], ["phone-dark", "dark", phone]]) {
  const page = await open(scheme, viewport);
  // By keyboard alone: the message field has the focus.
  await page.keyboard.type("What is the capital of France?");
  await page.keyboard.press("Enter");
  await answered(page, 1);
  check(`${name}: answer`, (await page.locator(".assistant").innerText()).includes("The capital of France is Paris."));
  if (viewport === phone) await page.click(".settings summary");
  await page.selectOption("#speculation", "tree:16");
  if (viewport === phone) await page.click(".settings summary");
  await page.focus("#text");
  await page.keyboard.type("List the first ten prime numbers.");
  await page.keyboard.press("Enter");
  await answered(page, 2);
  const tree = await page.locator("#tree").getAttribute("aria-label");
  check(`${name}: tree`, /^Draft tree: 16 rows, \d+ drafted tokens accepted/.test(tree), tree);
  const circles = await page.locator("#tree circle").count();
  check(`${name}: one circle per row and one for the bonus token`, circles === 17, circles);
  const rate = await page.locator("#rate").innerText(), per = await page.locator("#per").innerText();
  check(`${name}: figures`, Number(rate) > 0 && Number(per) >= 1, `${rate} ${per}`);
  check(`${name}: no sideways scrolling`, !(await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)));
  check(`${name}: no other host`, page.seen.size === 1, [...page.seen]);
  check(`${name}: no errors in the console`, page.problems.length === 0, page.problems);
  if (folder) await page.screenshot({ path: `${folder}/${name}.png` });
  await page.close();
}

{
  const page = await open("light", wide);
  const chunk = delta => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] })}\n\n`;
  const end = `data: ${JSON.stringify({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] })}\n\ndata: [DONE]\n\n`;
  const body = ": keep-alive\n\n" + chunk({ reasoning_content: "Let me <b>think</b>." }) + chunk({ content: "<i>Done</i>." }) + end;
  await page.route("**/v1/chat/completions", route => route.fulfill({ contentType: "text/event-stream", body }));
  await page.keyboard.type("x");
  await page.keyboard.press("Enter");
  await answered(page, 1);
  check("reasoning is folded", !(await page.locator("details.reasoning").evaluate(fold => fold.open)));
  check("text is text, not markup", (await page.locator(".assistant > span").first().innerText()) === "<i>Done</i>.");
  await page.click("details.reasoning summary");
  check("reasoning unfolds", (await page.locator("details.reasoning span").innerText()) === "Let me <b>think</b>.");
  await page.unroute("**/v1/chat/completions");
  await page.route("**/v1/chat/completions", route => route.fulfill({ status: 429, contentType: "application/json", body: '{"error":{"message":"The queue is full."}}' }));
  await page.keyboard.press("Escape");
  await page.focus("#text");
  await page.keyboard.type("y");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".error");
  check("a refusal is shown", (await page.locator(".error").innerText()) === "The queue is full.");
  await page.close();
}
{
  const page = await open("light", wide);
  await page.fill("#max", "4000");
  await page.focus("#text");
  await page.evaluate(() => { const old = window.fetch; window.fetch = (where, what) => {
    if (what && what.body) what = { ...what, body: JSON.stringify({ ...JSON.parse(what.body), ignore_eos: true }) };
    return old(where, what); }; });
  await page.keyboard.type("Count on.");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#tree svg"));
  await page.keyboard.press("Escape");
  await answered(page, 1);
  check("Escape stops", (await page.locator(".assistant").innerText()).includes("stopped"));
  await page.close();
}
await browser.close();
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
