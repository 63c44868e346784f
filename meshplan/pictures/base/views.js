for (const group of document.querySelectorAll(".views")) {
  const buttons = [...group.children];
  const views = [...group.parentElement.children].filter(each => each.matches(".view"));
  buttons.forEach((button, place) => button.addEventListener("click", () => {
    buttons.forEach((each, other) => each.setAttribute("aria-pressed", other === place));
    views.forEach((each, other) => { each.hidden = other !== place; });
  }));
}
