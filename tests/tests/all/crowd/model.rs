//! What each byte of the disk may be.

use std::sync::Mutex;

/// Bytes of a stripe: no multiple of any block, so that clients share the blocks of layers.
pub const STRIPE: u64 = 5000;

/// The disk: stripes that are written by one client each.
pub struct Model {
    stripes: Vec<Mutex<Stripe>>,
    writers: usize,
}

/// What may be in a stripe.
pub struct Stripe {
    /// All that was sent to it, oldest first.
    versions: Vec<Vec<u8>>,
    /// The newest that was answered: nothing older may be seen.
    answered: usize,
    /// It is not known which versions its bytes are of: only a change of all of it makes it so.
    pub mixed: bool,
    /// A connection was lost while it was being changed, and may change it yet.
    pub lost: bool,
}

impl Model {
    /// The disk as it is; stripes are dealt out to so many clients.
    pub fn new(bytes: &[u8], writers: usize) -> Model {
        let stripe = |bytes: &[u8]| Stripe {
            versions: vec![bytes.to_vec()],
            answered: 0,
            mixed: false,
            lost: false,
        };
        let stripes = bytes.chunks(STRIPE as usize).map(|bytes| Mutex::new(stripe(bytes)));
        Model { stripes: stripes.collect(), writers }
    }

    /// How many stripes there are.
    pub fn len(&self) -> usize {
        self.stripes.len()
    }

    /// The writer of a stripe.
    pub fn writer(&self, index: usize) -> usize {
        index % self.writers
    }

    /// A stripe for a look or a note.
    pub fn with<T>(&self, index: usize, act: impl FnOnce(&mut Stripe) -> T) -> T {
        act(&mut self.stripes[index].lock().unwrap())
    }

    /// Checks the whole disk, when all is quiet.
    pub fn all(&self, bytes: &[u8]) -> Result<(), String> {
        for (index, bytes) in bytes.chunks(STRIPE as usize).enumerate() {
            let seen = |stripe: &mut Stripe| stripe.check(stripe.answered, 0, bytes);
            self.with(index, seen).map_err(|why| format!("in the end, stripe {index}: {why}"))?;
        }
        Ok(())
    }
}

impl Stripe {
    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.versions[0].len()
    }

    /// Notes a change that is being sent; gives its number.
    pub fn change(&mut self, at: usize, bytes: &[u8]) -> usize {
        let mut new = self.versions[self.versions.len() - 1].clone();
        new[at..at + bytes.len()].copy_from_slice(bytes);
        self.versions.push(new);
        self.versions.len() - 1
    }

    /// Notes that a change was answered: what is older is gone.
    pub fn answered(&mut self, number: usize) {
        self.answered = self.answered.max(number);
        self.mixed = false;
    }

    /// The oldest version that a read which begins now may see.
    pub fn now(&self) -> usize {
        self.answered
    }

    /// Whether bytes at `at` of it may be what a read saw that began at version `since`.
    pub fn check(&self, since: usize, at: usize, bytes: &[u8]) -> Result<(), String> {
        let versions = &self.versions[since..];
        for (index, byte) in bytes.iter().enumerate() {
            if !versions.iter().any(|version| version[at + index] == *byte) {
                let may: Vec<_> = versions.iter().map(|version| version[at + index]).collect();
                let older = self.versions.iter().rposition(|old| old[at + index] == *byte);
                return Err(format!(
                    "byte {} is {byte:#x} and may be {may:x?}; it was so in version {older:?} of {}, \
                     answered {}",
                    at + index,
                    self.versions.len() - 1,
                    self.answered
                ));
            }
        }
        Ok(())
    }
}
