// Before anything is drawn: the theme that was chosen here last time. No module, so that the page never blinks.
try {
  const theme = localStorage.getItem('kvilt.theme');
  if (theme === '"dark"' || theme === '"light"') document.documentElement.dataset.theme = JSON.parse(theme);
} catch {
  // A browser without storage follows the system.
}
