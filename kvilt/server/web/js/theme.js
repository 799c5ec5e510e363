// Light or dark: the system's choice until the user makes another.

import { icon, set } from './dom.js';
import { local } from './storage.js';

const dark = matchMedia('(prefers-color-scheme: dark)');

const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? 'dark' : 'light')) === 'dark';

/** Make a button that switches. */
export function themeButton(button) {
  const show = () => {
    button.replaceChildren(icon(isDark() ? 'sun' : 'moon'));
    const label = isDark() ? 'Light theme' : 'Dark theme';
    set(button, 'aria-label', label);
    set(button, 'title', label);
  };
  button.addEventListener('click', () => {
    const next = isDark() ? 'light' : 'dark';
    document.documentElement.dataset.theme = next;
    local.set('theme', next);
    show();
  });
  dark.addEventListener('change', show);
  show();
}
