//! Outstanding requests of a library: by connection and number, so that late, duplicate and foreign
//! replies are recognized without dereferencing a pointer of the library.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// The requests of a connection. Its token names it towards the library.
pub struct RequestTable<T, O> {
    token: u64,
    /// The owner of the connection.
    pub owner: O,
    slots: Mutex<Slots<T>>,
}

struct Slots<T> {
    slots: Vec<TableSlot<T>>,
    free: Vec<u32>,
}

struct TableSlot<T> {
    /// Number of requests that have used this slot: part of the number, so that an old number is
    /// invalid.
    generation: u32,
    entry: Option<T>,
}

type ByToken<T, O> = HashMap<u64, Arc<RequestTable<T, O>>>;

/// Tables by token. Tokens are never reused.
pub struct RequestTables<T, O> {
    next: AtomicU64,
    tables: RwLock<Option<ByToken<T, O>>>,
}

/// Step between tokens: they look like addresses, but are not.
const STEP: u64 = 16;

impl<T, O> Default for RequestTables<T, O> {
    fn default() -> RequestTables<T, O> {
        RequestTables::new()
    }
}

impl<T, O> RequestTables<T, O> {
    /// No tables yet.
    pub const fn new() -> RequestTables<T, O> {
        RequestTables { next: AtomicU64::new(1), tables: RwLock::new(None) }
    }

    /// A new connection's table.
    pub fn open(&self, owner: O) -> Arc<RequestTable<T, O>> {
        let token = self.next.fetch_add(1, Ordering::Relaxed) * STEP;
        let slots = Mutex::new(Slots { slots: Vec::new(), free: Vec::new() });
        let table = Arc::new(RequestTable { token, owner, slots });
        let mut tables = self.tables.write().expect("no panic under this lock");
        tables.get_or_insert_default().insert(token, table.clone());
        table
    }

    /// Removes a table: its numbers are invalid from here on.
    pub fn close(&self, token: u64) {
        let closed = {
            let mut tables = self.tables.write().expect("no panic under this lock");
            tables.as_mut().and_then(|tables| tables.remove(&token))
        };
        drop(closed);
    }

    /// The table of a token.
    pub fn find(&self, token: u64) -> Option<Arc<RequestTable<T, O>>> {
        let tables = self.tables.read().expect("no panic under this lock");
        tables.as_ref().and_then(|tables| tables.get(&token).cloned())
    }

    /// Takes out a request by token and number, once.
    pub fn take(&self, token: u64, number: u64) -> Option<T> {
        self.find(token)?.take(number)
    }
}

impl<T, O> RequestTable<T, O> {
    /// The number that names this table.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Adds a request; returns its number.
    pub fn enter(&self, entry: T) -> u64 {
        let mut slots = self.slots.lock().expect("no panic under this lock");
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                slots.slots.push(TableSlot { generation: 0, entry: None });
                // Memory limits this long before.
                u32::try_from(slots.slots.len() - 1).expect("fewer than 2^32 requests at a time")
            }
        };
        let slot = &mut slots.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.entry = Some(entry);
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    /// Takes out a request, once.
    pub fn take(&self, number: u64) -> Option<T> {
        // The lower and the upper half of the number.
        let index = number as u32;
        let generation = (number >> 32) as u32;
        let mut slots = self.slots.lock().expect("no panic under this lock");
        let slot = slots.slots.get_mut(index as usize)?;
        if slot.generation != generation {
            return None;
        }
        let entry = slot.entry.take()?;
        slots.free.push(index);
        Some(entry)
    }

    /// Calls `look` with a request, if it is still there.
    pub fn with<R>(&self, number: u64, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let index = number as u32;
        let generation = (number >> 32) as u32;
        let mut slots = self.slots.lock().expect("no panic under this lock");
        let slot = slots.slots.get_mut(index as usize)?;
        if slot.generation != generation {
            return None;
        }
        slot.entry.as_mut().map(look)
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        let slots = self.slots.lock().expect("no panic under this lock");
        slots.slots.len() - slots.free.len()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn late_double_and_foreign_numbers_find_nothing() {
        let tables = RequestTables::new();
        let one = tables.open(());
        let two = tables.open(());
        let first = one.enter('a');
        let second = one.enter('b');
        assert_eq!(tables.take(two.token(), first), None);
        assert_eq!(tables.take(12345, first), None);
        assert_eq!(tables.take(0, 0), None);
        assert_eq!(tables.take(one.token(), first), Some('a'));
        assert_eq!(tables.take(one.token(), first), None);
        // The slot is reused under another number.
        let third = one.enter('c');
        assert_eq!(third as u32, first as u32);
        assert_eq!(tables.take(one.token(), first), None);
        assert_eq!(one.with(third, |entry| *entry), Some('c'));
        assert_eq!(one.len(), 2);
        assert_eq!(tables.take(one.token(), second), Some('b'));
        tables.close(one.token());
        assert_eq!(tables.take(one.token(), third), None);
    }

    /// An entry of this test: a waiter, and lent memory.
    struct Entry<'a> {
        waiting: Option<&'a AtomicUsize>,
        freed: &'a AtomicUsize,
        memory: Box<u64>,
    }

    impl Drop for Entry<'_> {
        fn drop(&mut self) {
            self.freed.fetch_add(*self.memory as usize, Ordering::Relaxed);
        }
    }

    /// Threads that reply, reply twice, and give up waiting, while connections open and close: each
    /// waiter is notified exactly once, and lent memory is freed exactly once. `BLOCKHAUL_LONG`
    /// runs it a million times; `cargo xtask races` under ThreadSanitizer.
    #[test]
    fn answers_that_race_take_each_request_exactly_once() {
        let long = std::env::var_os("BLOCKHAUL_LONG").is_some();
        let rounds: usize = if long { 1_000_000 } else { 20_000 };
        let heard = AtomicUsize::new(0);
        let freed = AtomicUsize::new(0);
        let tables = RequestTables::new();
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (0..4).map(|_| std::sync::mpsc::sync_channel::<(u64, u64)>(64)).unzip();
        std::thread::scope(|scope| {
            for (role, receiver) in receivers.into_iter().enumerate() {
                let tables = &tables;
                let heard = &heard;
                scope.spawn(move || {
                    for (token, number) in receiver {
                        // The last one is the timeout: it removes the waiter, and leaves the
                        // memory.
                        if role == 3 {
                            let table: Option<Arc<RequestTable<Entry<'_>, ()>>> =
                                tables.find(token);
                            let waiting =
                                table.and_then(|table| table.with(number, |e| e.waiting.take()));
                            if waiting.flatten().is_some() {
                                heard.fetch_add(1, Ordering::Relaxed);
                            }
                        } else if let Some(mut entry) = tables.take(token, number)
                            && entry.waiting.take().is_some()
                        {
                            heard.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            let mut table = tables.open(());
            for round in 0..rounds {
                let waiting = Some(&heard);
                let freed = &freed;
                let number = table.enter(Entry { waiting, freed, memory: Box::new(1) });
                for sender in &senders {
                    sender.send((table.token(), number)).unwrap();
                }
                // The client disconnects; its connection ends with the last reply, but others still
                // arrive late.
                if round % 500 == 499 {
                    while !table.is_empty() {
                        std::thread::yield_now();
                    }
                    tables.close(table.token());
                    table = tables.open(());
                }
            }
            drop(senders);
        });
        assert_eq!(heard.load(Ordering::Relaxed), rounds);
        assert_eq!(freed.load(Ordering::Relaxed), rounds);
    }
}
