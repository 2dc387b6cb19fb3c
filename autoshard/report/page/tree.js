// ---- tree
const folds = [...document.querySelectorAll(".tree details")];
byId("open-all").addEventListener("click", () => folds.forEach(fold => { fold.open = true; }));
byId("close-all").addEventListener("click", () => folds.forEach((fold, i) => { fold.open = i === 0; }));
