//! Requests in flight by their cookies.

/// A table whose keys are cookies. Slots are reused, cookies are not.
#[derive(Debug)]
pub(super) struct CookieTable<V> {
    slots: Vec<Option<(u64, V)>>,
    free: Vec<u32>,
    /// The upper half of the last cookie.
    generation: u32,
}

impl<V> CookieTable<V> {
    pub(super) const fn new() -> CookieTable<V> {
        CookieTable { slots: Vec::new(), free: Vec::new(), generation: 0 }
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    // nbd: transmission.cookies-differ
    /// The cookie of the next entry; `None` if the table is full.
    pub(super) fn next_cookie(&self) -> Option<u64> {
        let slot = match self.free.last() {
            Some(slot) => *slot,
            None => u32::try_from(self.slots.len()).ok()?,
        };
        Some(u64::from(slot) | u64::from(self.generation.wrapping_add(1)) << 32)
    }

    /// Adds an entry with the cookie of [`CookieTable::next_cookie`].
    pub(super) fn insert(&mut self, cookie: u64, value: V) {
        self.generation = self.generation.wrapping_add(1);
        let entry = Some((cookie, value));
        match self.free.pop() {
            Some(_) => {
                if let Some(slot) = self.slots.get_mut(index(cookie)) {
                    *slot = entry;
                }
            }
            None => self.slots.push(entry),
        }
    }

    pub(super) fn get(&self, cookie: u64) -> Option<&V> {
        let entry = self.slots.get(index(cookie))?.as_ref();
        entry.filter(|entry| entry.0 == cookie).map(|entry| &entry.1)
    }

    pub(super) fn get_mut(&mut self, cookie: u64) -> Option<&mut V> {
        let entry = self.slots.get_mut(index(cookie))?.as_mut();
        entry.filter(|entry| entry.0 == cookie).map(|entry| &mut entry.1)
    }

    pub(super) fn remove(&mut self, cookie: u64) -> Option<V> {
        let slot = self.slots.get_mut(index(cookie))?;
        let (_, value) = slot.take_if(|entry| entry.0 == cookie)?;
        self.free.push(lower(cookie));
        Some(value)
    }

    /// Removes all entries.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = V> + use<V> {
        self.free.clear();
        std::mem::take(&mut self.slots).into_iter().flatten().map(|(_, value)| value)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is the slot")]
const fn lower(cookie: u64) -> u32 {
    cookie as u32
}

const fn index(cookie: u64) -> usize {
    lower(cookie) as usize
}
