//! Facts with an emulated ability.

use crate::{Can, Facts};

/// The facts with an ability added and marked as emulated; all other requests pass unchanged.
pub(super) fn supply(below: &Facts, can: Can) -> Facts {
    let mut facts = Facts::same(below);
    facts.can |= can;
    facts.emulated |= can;
    facts
}
