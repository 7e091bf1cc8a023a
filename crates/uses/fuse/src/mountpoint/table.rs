//! The kernel's table of mounts.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// The device of what is mounted at the full path `path`, as MAJOR:MINOR; `None`: nothing is.
pub(super) fn find(path: &Path) -> Option<String> {
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    find_in(&table, path.as_os_str().as_bytes())
}

/// The same in this table. The last mount covers those before it.
fn find_in(table: &[u8], path: &[u8]) -> Option<String> {
    let mut found = None;
    for line in table.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b' ');
        let device = fields.nth(2);
        let place = fields.nth(1);
        if let (Some(device), Some(place)) = (device, place)
            && unescaped(place) == path
        {
            found = std::str::from_utf8(device).ok().map(str::to_string);
        }
    }
    found
}

/// A path without the escapes of the table: `\040` is a space.
fn unescaped(place: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(place.len());
    let mut rest = place;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.first_chunk::<3>().filter(|_| byte == b'\\');
        let escaped = digits.and_then(|digits| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        });
        match escaped {
            Some(escaped) => (out.push(escaped), rest = &after[3..]).0,
            None => (out.push(byte), rest = after).0,
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_of_a_path_is_found() {
        let table = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
            23 22 0:30 / /mnt/a\\040b rw - fuse.x y rw\n\
            24 22 0:31 / /mnt/a\\040b ro - fuse.x y rw\n\
            short\n";
        assert_eq!(find_in(table, b"/mnt/a b"), Some("0:31".into()));
        assert_eq!(find_in(table, b"/"), Some("8:1".into()));
        assert_eq!(find_in(table, b"/mnt/a"), None);
        assert_eq!(unescaped(b"a\\"), b"a\\");
        assert_eq!(unescaped(b"a\\9999\\134"), b"a\\9999\\");
    }
}
