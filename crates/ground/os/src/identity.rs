//! Users and groups: looked up by name, and assumed by the whole process.
#![expect(
    unsafe_code,
    reason = "functions of the C library that fill memory or change all threads"
)]

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;

/// Memory for one entry of the user or group database, initial and maximum.
const ENTRY: usize = 4 << 10;
const ENTRY_MAX: usize = 1 << 20;
/// Maximum number of groups of a user (NGROUPS_MAX of Linux).
const GROUPS_MAX: usize = 65536;

/// A user, a group, and the user's supplementary groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserIdentity {
    uid: Option<libc::uid_t>,
    gid: libc::gid_t,
    groups: Vec<libc::gid_t>,
}

impl UserIdentity {
    /// Looks up a user, by name or number, and a group. The default group is the user's;
    /// supplementary groups are the user's. Without a user only the group changes.
    ///
    /// # Errors
    /// A message about an unknown name, for the user.
    pub fn find(user: Option<&str>, group: Option<&str>) -> Result<UserIdentity, String> {
        let group = group.map(find_group).transpose()?;
        let Some(user) = user else {
            let gid = group.ok_or("neither a user nor a group")?;
            return Ok(UserIdentity { uid: None, gid, groups: vec![gid] });
        };
        match find_user(user)? {
            UserLookup::Entry { uid, gid: own, name } => {
                let gid = group.unwrap_or(own);
                let groups = groups_of(&name, gid).map_err(|error| {
                    format!("cannot look up the groups of the user {user:?}: {error}")
                })?;
                Ok(UserIdentity { uid: Some(uid), gid, groups })
            }
            UserLookup::Number(uid) => {
                let gid = group.ok_or_else(|| {
                    format!("the user {user} has no entry, so that its group must be given, too")
                })?;
                Ok(UserIdentity { uid: Some(uid), gid, groups: vec![gid] })
            }
        }
    }

    /// The user's number, if the user changes.
    pub fn uid(&self) -> Option<u32> {
        self.uid
    }

    /// The group's number.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// Makes all threads of this process run as this user and group, for good: the saved IDs
    /// change, too, and the capabilities are dropped with the user.
    ///
    /// # Errors
    /// The process lacks permission; some IDs may have changed by then: end the process.
    pub fn assume(&self) -> io::Result<()> {
        let check = |result: libc::c_int| match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: the pointer is to as many numbers as the length says, which are only read. The C
        // library changes all threads, for each of the three calls.
        check(unsafe { libc::setgroups(self.groups.len(), self.groups.as_ptr()) })?;
        // SAFETY: a call without memory.
        check(unsafe { libc::setresgid(self.gid, self.gid, self.gid) })?;
        if let Some(uid) = self.uid {
            // SAFETY: a call without memory.
            check(unsafe { libc::setresuid(uid, uid, uid) })?;
            // SAFETY: a call without memory.
            if uid != 0 && unsafe { libc::setresuid(0, 0, 0) } == 0 {
                return Err(io::Error::other("the user could be changed back"));
            }
        }
        Ok(())
    }
}

/// A user that was looked up.
enum UserLookup {
    Entry {
        uid: libc::uid_t,
        gid: libc::gid_t,
        name: CString,
    },
    /// A number without an entry.
    Number(libc::uid_t),
}

fn find_user(user: &str) -> Result<UserLookup, String> {
    let cannot = |error: io::Error| format!("cannot look up the user {user:?}: {error}");
    let name = CString::new(user).map_err(|_| "the name of a user holds a NUL".to_string())?;
    let number = user.parse::<libc::uid_t>().ok();
    let by_name = |entry: *mut libc::passwd, memory: *mut libc::c_char, len, found: *mut _| {
        // SAFETY: `lookup` hands out pointers to live memory, of the length that it says.
        unsafe { libc::getpwnam_r(name.as_ptr(), entry, memory, len, found) }
    };
    let take = |entry: &libc::passwd| {
        // SAFETY: the function has set the name to a string that lies in the memory of the entry.
        let name = unsafe { CStr::from_ptr(entry.pw_name) }.to_owned();
        UserLookup::Entry { uid: entry.pw_uid, gid: entry.pw_gid, name }
    };
    if let Some(found) = lookup(by_name, take).map_err(cannot)? {
        return Ok(found);
    }
    let Some(uid) = number else { return Err(format!("there is no user {user:?}")) };
    let by_number = |entry: *mut libc::passwd, memory: *mut libc::c_char, len, found: *mut _| {
        // SAFETY: as above.
        unsafe { libc::getpwuid_r(uid, entry, memory, len, found) }
    };
    Ok(lookup(by_number, take).map_err(cannot)?.unwrap_or(UserLookup::Number(uid)))
}

fn find_group(group: &str) -> Result<libc::gid_t, String> {
    let name = CString::new(group).map_err(|_| "the name of a group holds a NUL".to_string())?;
    let by_name = |entry: *mut libc::group, memory: *mut libc::c_char, len, found: *mut _| {
        // SAFETY: `lookup` hands out pointers to live memory, of the length that it says.
        unsafe { libc::getgrnam_r(name.as_ptr(), entry, memory, len, found) }
    };
    let found = lookup(by_name, |entry: &libc::group| entry.gr_gid)
        .map_err(|error| format!("cannot look up the group {group:?}: {error}"))?;
    let found = found.or_else(|| group.parse().ok());
    found.ok_or_else(|| format!("there is no group {group:?}"))
}

/// Calls a function of the getpwnam_r(3) kind with as much memory as it needs.
fn lookup<E, T>(
    call: impl Fn(*mut E, *mut libc::c_char, usize, *mut *mut E) -> libc::c_int,
    take: impl Fn(&E) -> T,
) -> io::Result<Option<T>> {
    let mut memory: Vec<libc::c_char> = vec![0; ENTRY];
    loop {
        let mut entry = MaybeUninit::<E>::uninit();
        let mut found = std::ptr::null_mut();
        match call(entry.as_mut_ptr(), memory.as_mut_ptr(), memory.len(), &mut found) {
            0 if found.is_null() => return Ok(None),
            // SAFETY: it has found an entry, so that `entry` is filled and its strings lie in `memory`;
            // both live until `take` returns, which keeps nothing of them.
            0 => return Ok(Some(take(unsafe { entry.assume_init_ref() }))),
            libc::EINTR => {}
            libc::ERANGE if memory.len() < ENTRY_MAX => memory.resize(memory.len() * 2, 0),
            // What some sources say where there is no entry.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// The groups that a user is in, `gid` among them.
fn groups_of(user: &CStr, gid: libc::gid_t) -> io::Result<Vec<libc::gid_t>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut count = libc::c_int::try_from(groups.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the name is a string, and the array is as long as `count` says.
        let all =
            unsafe { libc::getgrouplist(user.as_ptr(), gid, groups.as_mut_ptr(), &mut count) };
        if all >= 0 {
            groups.truncate(usize::try_from(count).unwrap_or_default());
            return Ok(groups);
        }
        if groups.len() >= GROUPS_MAX {
            return Err(io::Error::other("too many groups"));
        }
        groups.resize(groups.len() * 4, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_found_by_name_and_number() {
        let root = UserIdentity::find(Some("root"), None).unwrap();
        assert_eq!((root.uid(), root.gid()), (Some(0), 0));
        assert!(root.groups.contains(&0), "{root:?}");
        assert_eq!(UserIdentity::find(Some("0"), None).unwrap(), root);
        let only = UserIdentity::find(None, Some("root")).unwrap();
        assert_eq!((only.uid(), only.gid(), &only.groups[..]), (None, 0, &[0][..]));
        let odd = UserIdentity::find(Some("4000000000"), Some("3999999999")).unwrap();
        assert_eq!((odd.uid(), odd.gid()), (Some(4_000_000_000), 3_999_999_999));
        for (user, group, word) in [
            (Some("no such user"), None, "there is no user"),
            (None, Some("no such group"), "there is no group"),
            (Some("4000000000"), None, "must be given"),
            (Some("a\0b"), None, "NUL"),
            (None, None, "neither"),
        ] {
            let why = UserIdentity::find(user, group).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
    }
}
