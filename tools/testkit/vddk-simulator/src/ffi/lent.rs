//! Memory that the program lends to the library for one request.

/// Memory of the program, for one request.
pub(crate) struct ProgramMemory {
    pointer: *mut u8,
    len: usize,
}

// SAFETY: the program lends the memory to the library until its callback is called; only the
// request that holds this uses it.
unsafe impl Send for ProgramMemory {}

impl ProgramMemory {
    /// # Safety
    /// `pointer` is null or leads to `len` bytes that are the library's until the request ends.
    pub(super) unsafe fn new(pointer: *mut u8, len: usize) -> Option<ProgramMemory> {
        (!pointer.is_null()).then_some(ProgramMemory { pointer, len })
    }

    pub(crate) fn address(&self) -> usize {
        self.pointer.addr()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the promise of `new`; sectors of a disk fit in memory as its range was checked.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only user.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}
