// What a browser keeps for this page. It may be full or forbidden: then nothing is kept, and nothing breaks.

function over(open) {
  return {
    get(name, otherwise = null) {
      try {
        const text = open().getItem(`kvilt.${name}`);
        return text === null ? otherwise : JSON.parse(text);
      } catch {
        return otherwise;
      }
    },
    set(name, value) {
      try {
        if (value === null) open().removeItem(`kvilt.${name}`);
        else open().setItem(`kvilt.${name}`, JSON.stringify(value));
        return true;
      } catch {
        return false;
      }
    },
  };
}

/** Ends with the tab: the key and the conversation. */
export const session = over(() => sessionStorage);

/** Stays: the theme and the settings. */
export const local = over(() => localStorage);
