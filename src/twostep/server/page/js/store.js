// Conversations live in this browser (IndexedDB) and nowhere else.

const NAME = "twostep";
const STORE = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function run(mode, use) {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(STORE, mode);
      const request = use(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = () => reject(transaction.error);
      transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

// {id, title, changed (ms), messages}
export const save = (conversation) => run("readwrite", (store) => store.put(conversation));
export const remove = (id) => run("readwrite", (store) => store.delete(id));
export const all = async () =>
  (await run("readonly", (store) => store.getAll())).sort((a, b) => b.changed - a.changed);
