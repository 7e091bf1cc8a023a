//! What layers have in common that show what a packed file holds.

use block::{BlockSizes, Can, Facts};

/// The facts of content that is only read, of a file with these.
pub(crate) fn facts_of_content(file: &Facts, size: u64) -> Facts {
    let mut facts = Facts::new(file.name.clone(), size);
    facts.description.clone_from(&file.description);
    // All connections read the same, and nothing is ever written.
    facts.can = Can::MULTI_CONN;
    facts.block = BlockSizes::default();
    facts.rotational = file.rotational;
    facts.allocation_unit = 1;
    facts
}
