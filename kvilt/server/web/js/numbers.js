// Numbers as people read them.

const whole = new Intl.NumberFormat('en');

export const count = (n) => whole.format(n);

export const tokens = (n) => `${count(n)} ${n === 1 ? 'token' : 'tokens'}`;

export function bytes(n) {
  if (n < 1024) return `${n} B`;
  const units = ['KB', 'MB', 'GB', 'TB'];
  let at = -1;
  for (; n >= 1024 && at < units.length - 1; at += 1) n /= 1024;
  return `${n.toFixed(n < 10 ? 1 : 0)} ${units[at]}`;
}

export function seconds(s) {
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

export const rate = (perSecond) => `${perSecond.toFixed(perSecond < 10 ? 1 : 0)} tok/s`;
