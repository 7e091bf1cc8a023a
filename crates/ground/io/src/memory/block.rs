//! Blocks of memory that buffers are made of.
#![expect(unsafe_code, reason = "aligned allocation, handed out as byte slices")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

use super::alignment::ALIGN;
use super::shared::SharedPart;

/// From this size on, in bytes, a block is a separate mapping: its pages are allocated on first
/// use, while the allocator would write zeroes to all of them first.
const MAPPED: usize = 64 << 10;

/// Memory of a power-of-two size, aligned to [`ALIGN`]; always initialised.
pub(crate) struct AlignedBlock {
    ptr: NonNull<u8>,
    size: usize,
    /// The pages of a mapping; none if the memory is the allocator's.
    pages: Option<Arc<PageOwner>>,
}

/// The pages of a mapping.
#[derive(Debug, Default)]
pub(crate) enum PageOwner {
    /// Private: the allocation identifies them, as long as the block has them.
    #[default]
    Own,
    /// Shared with another process.
    Shared(#[expect(dead_code, reason = "gives itself back when it is dropped")] SharedPart),
}

// SAFETY: a `AlignedBlock` owns its memory exclusively and has no thread affinity.
unsafe impl Send for AlignedBlock {}
// SAFETY: shared access to a `AlignedBlock` only reads its memory.
unsafe impl Sync for AlignedBlock {}

impl AlignedBlock {
    /// Allocates `size` zeroed bytes; `size` is a non-zero multiple of [`ALIGN`].
    pub(crate) fn new(size: usize) -> AlignedBlock {
        let layout = Self::layout(size);
        let ptr = if size >= MAPPED {
            map(size)
        } else {
            // SAFETY: the layout has a non-zero size (asserted in `layout`).
            unsafe { alloc_zeroed(layout) }
        };
        match NonNull::new(ptr) {
            Some(ptr) => AlignedBlock { ptr, size, pages: (size >= MAPPED).then(Arc::default) },
            None => handle_alloc_error(layout),
        }
    }

    /// A block of memory shared with another process.
    pub(super) fn of_shared(part: SharedPart) -> AlignedBlock {
        let ptr = part.start();
        let size = part.size();
        AlignedBlock { ptr, size, pages: Some(Arc::new(PageOwner::Shared(part))) }
    }

    /// Whether another process may access the memory. It belongs to no pool then.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.pages.as_deref(), Some(PageOwner::Shared(_)))
    }

    /// The pages of a large private block: a weak reference shows whether the block still has them.
    pub(crate) fn pages(&self) -> Option<&Arc<PageOwner>> {
        self.pages.as_ref().filter(|pages| matches!(***pages, PageOwner::Own))
    }

    /// Start of the block; all of it is initialised.
    pub(super) fn start(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Address and size.
    pub(crate) fn memory(&self) -> libc::iovec {
        libc::iovec { iov_base: self.ptr.as_ptr().cast(), iov_len: self.size }
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Frees the pages and gets zeroed ones instead; a reader of the old pages still sees their
    /// current contents. False if the kernel refuses.
    pub(crate) fn exchange_pages(&mut self) -> bool {
        if self.is_shared() {
            return false;
        }
        let ptr = self.ptr.as_ptr().cast();
        self.pages = self.pages.take().map(|_| Arc::default());
        // SAFETY: the block is private anonymous memory, page-aligned at both ends, and exclusively
        // ours (`&mut`). Its bytes stay initialised: they become zero.
        unsafe { libc::madvise(ptr, self.size, libc::MADV_DONTNEED) == 0 }
    }

    fn layout(size: usize) -> Layout {
        assert!(size > 0 && size.is_multiple_of(ALIGN), "block size {size}");
        Layout::from_size_align(size, ALIGN).expect("sizes are far below isize::MAX")
    }
}

impl Drop for AlignedBlock {
    fn drop(&mut self) {
        let ptr = self.ptr.as_ptr();
        if self.is_shared() {
            // The part gives itself back.
            return;
        }
        if self.size >= MAPPED {
            // SAFETY: mapped in `new` with this size, not unmapped before, and without references.
            // It fails only if a mapping would be split in two beyond the limit of mappings: then
            // the memory leaks.
            _ = unsafe { libc::munmap(ptr.cast(), self.size) };
        } else {
            // SAFETY: allocated in `new` with the same layout, and not freed before.
            unsafe { dealloc(ptr, Self::layout(self.size)) };
        }
    }
}

/// Maps fresh zero pages; null on failure.
fn map(size: usize) -> *mut u8 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
    let ptr = unsafe { libc::mmap(std::ptr::null_mut(), size, access, kind, -1, 0) };
    if ptr == libc::MAP_FAILED { std::ptr::null_mut() } else { ptr.cast() }
}
