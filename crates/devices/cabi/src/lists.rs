//! Lists of extents and of exports that plugins fill through functions.

use std::ffi::{CString, c_char};

/// Maximum number of extents in one list: more are dropped, and requested again if needed.
const EXTENTS_MAX: usize = 1 << 20;
/// Maximum number of exports in one list, and maximum length of a name or description in bytes
/// (NBD's limit).
const EXPORTS_MAX: usize = 10_000;
const STRING_MAX: usize = 4096;

/// A run of bytes in one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PluginExtent {
    pub(crate) at: u64,
    pub(crate) len: u64,
    /// 1: hole, 2: reads as zeroes.
    pub(crate) state: u32,
}

/// The extents of a range, in ascending order and without gaps.
pub(crate) struct ExtentList {
    start: u64,
    end: u64,
    /// Where the next extent must begin, after the first one.
    next: Option<u64>,
    list: Vec<PluginExtent>,
}

impl ExtentList {
    /// An empty list for the range from `start` up to `end`.
    pub(crate) fn new(start: u64, end: u64) -> ExtentList {
        ExtentList { start, end, next: None, list: Vec::new() }
    }

    /// Adds an extent. Ignores what lies outside the range.
    pub(crate) fn add(&mut self, at: u64, len: u64, state: u32) -> Result<(), &'static str> {
        if self.next.is_some_and(|next| next != at) {
            return Err("extents must be added in ascending order and without gaps");
        }
        let end = at.checked_add(len).ok_or("an extent ends behind all offsets")?;
        if len == 0 {
            return Ok(());
        }
        self.next = Some(end);
        let from = at.max(self.start);
        let to = end.min(self.end);
        if from >= to {
            // Before the range, or after it.
            return if self.list.is_empty() && at > self.start {
                Err("the first extent must cover the start of the range")
            } else {
                Ok(())
            };
        }
        if self.list.is_empty() && from > self.start {
            return Err("the first extent must cover the start of the range");
        }
        let full = self.list.len() >= EXTENTS_MAX;
        match self.list.last_mut() {
            Some(last) if last.state == state => last.len += to - from,
            _ if !full => {
                self.list.push(PluginExtent { at: from, len: to - from, state });
            }
            _ => {
                // The list ends here; nothing after this gap may be added.
                self.end = from;
            }
        }
        Ok(())
    }

    /// The extents so far.
    pub(crate) fn list(&self) -> &[PluginExtent] {
        &self.list
    }
}

/// An export that a plugin offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PluginExport {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
}

/// An export as C has it (`struct nbdkit_export`).
#[repr(C)]
pub struct CExport {
    pub(crate) name: *const c_char,
    pub(crate) description: *const c_char,
}

/// The exports that a plugin offers.
#[derive(Default)]
pub(crate) struct ExportList {
    list: Vec<PluginExport>,
    /// Strings that were passed to a filter.
    shown: Vec<CString>,
    /// Positions at which the plugin added its default export.
    pub(crate) default_at: Vec<usize>,
}

impl ExportList {
    /// Adds an export.
    pub(crate) fn add(
        &mut self,
        name: &str,
        description: Option<&str>,
    ) -> Result<(), &'static str> {
        if self.list.len() + self.default_at.len() >= EXPORTS_MAX {
            return Err("too many exports");
        }
        if name.len() > STRING_MAX || description.is_some_and(|text| text.len() > STRING_MAX) {
            return Err("the name or description of an export is too long");
        }
        self.list
            .push(PluginExport { name: name.into(), description: description.map(Into::into) });
        Ok(())
    }

    /// Adds the plugin's default export, whose name is queried later.
    pub(crate) fn add_default(&mut self) -> Result<(), &'static str> {
        if self.list.len() + self.default_at.len() >= EXPORTS_MAX {
            return Err("too many exports");
        }
        self.default_at.push(self.list.len());
        Ok(())
    }

    /// Number of exports; default exports count once they have a name.
    pub(crate) fn count(&self) -> usize {
        self.list.len()
    }

    /// An export as C has it; null pointers where there is none.
    pub(crate) fn get(&mut self, index: usize) -> CExport {
        let Some(export) = self.list.get(index) else {
            return CExport { name: std::ptr::null(), description: std::ptr::null() };
        };
        let shown = &mut self.shown;
        let mut pointer = |text: &str| {
            // They were C strings.
            let text = CString::new(text).unwrap_or_default();
            let pointer = text.as_ptr();
            shown.push(text);
            pointer
        };
        CExport {
            name: pointer(&export.name),
            description: export.description.as_deref().map_or(std::ptr::null(), pointer),
        }
    }

    /// Sets the name of default exports; without one they are removed.
    pub(crate) fn resolve(&mut self, default: Option<&str>) {
        for at in std::mem::take(&mut self.default_at).into_iter().rev() {
            if let Some(name) = default {
                self.list.insert(at, PluginExport { name: name.into(), description: None });
            }
        }
    }

    /// The exports that have names.
    pub(crate) fn into_list(self) -> Vec<PluginExport> {
        self.list
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_clipped_joined_and_checked() {
        let mut extents = ExtentList::new(100, 200);
        extents.add(0, 50, 0).unwrap();
        extents.add(50, 60, 3).unwrap();
        extents.add(110, 10, 3).unwrap();
        extents.add(120, 0, 1).unwrap();
        extents.add(120, 500, 0).unwrap();
        extents.add(620, 5, 1).unwrap();
        let wanted = [
            PluginExtent { at: 100, len: 20, state: 3 },
            PluginExtent { at: 120, len: 80, state: 0 },
        ];
        assert_eq!(extents.list(), wanted);
        assert!(extents.add(700, 1, 0).is_err());
    }

    #[test]
    fn a_list_must_cover_its_start_and_not_overflow() {
        assert!(ExtentList::new(100, 200).add(101, 1, 0).is_err());
        assert!(ExtentList::new(100, 200).add(300, 1, 0).is_err());
        assert!(ExtentList::new(100, 200).add(u64::MAX, 2, 0).is_err());
    }

    #[test]
    fn a_full_list_ends_early_but_has_no_gap() {
        let mut extents = ExtentList::new(0, u64::MAX);
        for at in 0..EXTENTS_MAX as u64 + 10 {
            extents.add(at, 1, (at % 2) as u32).unwrap();
        }
        let list = extents.list();
        assert_eq!(list.len(), EXTENTS_MAX);
        assert!(list.windows(2).all(|pair| pair[0].at + pair[0].len == pair[1].at));
    }

    #[test]
    fn the_default_export_stands_where_it_was_put() {
        let mut exports = ExportList::default();
        exports.add("a", None).unwrap();
        exports.add_default().unwrap();
        exports.add("b", Some("text")).unwrap();
        exports.resolve(Some("d"));
        let names: Vec<_> = exports.into_list().into_iter().map(|export| export.name).collect();
        assert_eq!(names, ["a", "d", "b"]);
    }
}
