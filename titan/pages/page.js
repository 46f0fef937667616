// What a chart's points are is in its data-points: [[x in percent, what to say], …] in order of x.
"use strict";
const tip = document.getElementById("tip");
function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 18) + "px";
}
for (const plot of document.querySelectorAll("[data-points]")) {
  const points = JSON.parse(plot.dataset.points), cursor = document.createElement("div");
  cursor.className = "cursor";
  cursor.hidden = true;
  plot.append(cursor);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), at = 100 * (event.clientX - box.left) / box.width;
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < at) low = middle + 1; else high = middle;
    }
    if (low > 0 && at - points[low - 1][0] < points[low][0] - at) low -= 1;
    cursor.style.left = points[low][0] + "%";
    cursor.hidden = false;
    show(points[low][1], event.clientX, event.clientY);
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = cursor.hidden = true; });
}
for (const item of document.querySelectorAll("[data-tip]")) {
  item.addEventListener("pointermove", (event) => show(item.dataset.tip, event.clientX, event.clientY));
  item.addEventListener("pointerleave", () => { tip.hidden = true; });
}
