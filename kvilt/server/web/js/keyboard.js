// Keys that work everywhere on the page. Keys that belong to one box are handled there.

const STEP = { ArrowUp: -1, ArrowDown: 1 };
const TURN = { ArrowLeft: -1, ArrowRight: 1 };

const isText = (target) => target.matches?.('textarea, input, select, [contenteditable]');

/** `app` has thread, composer, tree, busy and the acts. */
export function listen(app) {
  document.addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector('dialog[open]')) return;
    if (event.key === 'Escape' ? escape(app) : arrows(app, event) || letters(app, event)) event.preventDefault();
  });
}

function escape(app) {
  if (app.busy) app.stop();
  else if (app.inspector.contains(document.activeElement)) app.inspector.close();
  else if (app.chats.contains(document.activeElement)) app.chats.close();
  else app.composer.focus();
  return true;
}

/** Arrows walk on a message; with Alt, or from an empty box upwards, also from elsewhere. */
function arrows(app, event) {
  const { key, altKey, target } = event;
  if (!(key in STEP || key in TURN) || event.ctrlKey || event.metaKey || event.shiftKey) return false;
  const inBox = target === app.composer.box;
  if (isText(target) && !(inBox && app.composer.empty)) return false;
  const onMessage = target.matches?.('.message');
  if (!altKey && !onMessage && !(inBox && key === 'ArrowUp')) return false;
  const at = app.thread.focused();
  return key in STEP ? step(app, at, STEP[key]) : turn(app, at, TURN[key]);
}

function step(app, at, by) {
  const path = app.tree.path();
  if (!path.length) return false;
  const to = at ? path.indexOf(at) + by : path.length - 1;
  if (to >= path.length) app.composer.focus();
  else app.thread.focus(path[Math.max(0, to)]);
  return true;
}

/** Without a message to stand on, the last one that has branches turns. */
function turn(app, at, by) {
  const node = at ?? app.tree.path().findLast((one) => app.tree.placeOf(one).of > 1);
  if (!node) return false;
  app.acts.walk(node, by);
  return true;
}

function letters(app, event) {
  if (!event.target.matches?.('.message') || event.ctrlKey || event.metaKey || event.altKey) return false;
  const node = app.thread.focused();
  switch (event.key.toLowerCase()) {
    case 'e':
      return node.role === 'user' && !app.busy && (app.thread.edit(node), true);
    case 'r':
      return node.role === 'assistant' && !app.busy && (app.acts.regenerate(node), true);
    case 'c':
      navigator.clipboard?.writeText(node.text).catch(() => {});
      return true;
    default:
      return false;
  }
}
