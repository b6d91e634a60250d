// KaTeX 0.19.1 (MIT license, beside this file) draws the formulas that pymdownx.arithmatex has marked.
for (const formula of document.querySelectorAll(".arithmatex"))
  katex.render(formula.textContent.slice(2, -2), formula, { displayMode: formula.tagName === "DIV", throwOnError: false });
