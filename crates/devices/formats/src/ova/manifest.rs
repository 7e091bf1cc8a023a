//! The manifest of an OVA: a member with digests of the others.

use std::fmt::Write as _;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_layers::ArchiveMember;
use openssl::hash::{Hasher, MessageDigest};

/// Bytes that are read and digested at a time.
const PART: u64 = 1 << 20;
/// Maximum number of files in a manifest.
const FILES_MAX: usize = 10_000;

/// The digests of an archive.
pub(super) struct OvaManifest {
    name: String,
    files: Vec<FileDigest>,
}

struct FileDigest {
    file: String,
    algorithm: String,
    /// In lower-case hexadecimal digits.
    digest: String,
}

impl OvaManifest {
    /// Parses the lines `SHA256(FILE)= DIGEST` of the member `name`. The error says what is wrong with them.
    pub(super) fn parse(name: &str, text: &str) -> std::result::Result<OvaManifest, String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut files = Vec::new();
        for line in lines {
            let file = FileDigest::parse(line);
            files.push(
                file.ok_or_else(|| format!("the manifest {name:?} has a line that is no digest"))?,
            );
            if files.len() > FILES_MAX {
                return Err(format!("the manifest {name:?} has more than {FILES_MAX} files"));
            }
        }
        Ok(OvaManifest { name: name.to_string(), files })
    }

    /// Compares the contents of a member with its digest, if the manifest has one.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if they differ, [`Kind::Unsupported`] for another algorithm, and errors of reads.
    pub(super) async fn check(
        &self,
        device: &Arc<dyn Device>,
        member: &ArchiveMember,
    ) -> Result<()> {
        let wanted = self.files.iter().find(|one| member.is_called(one.file.as_bytes()));
        let Some(FileDigest { file, algorithm, digest }) = wanted else { return Ok(()) };
        let kind = algorithm_of(algorithm).ok_or_else(|| {
            let text =
                format!("the manifest {:?} has a digest of the kind {algorithm:?}", self.name);
            ignorable(Error::new(Kind::Unsupported, text))
        })?;
        if digest_of(device, member, kind).await? == *digest {
            return Ok(());
        }
        let text = format!(
            "{file:?} has another {algorithm} than the manifest {:?} says: it is damaged",
            self.name
        );
        Err(ignorable(Error::new(Kind::Invalid, text)))
    }
}

/// The error with what to do to read the disk nevertheless.
fn ignorable(error: Error) -> Error {
    error.with_remedy("get the OVA again, or read it as it is with manifest=ignore")
}

impl FileDigest {
    fn parse(line: &str) -> Option<FileDigest> {
        let (algorithm, rest) = line.split_once('(')?;
        let (file, digest) = rest.rsplit_once(')')?;
        let digest = digest.trim_start().strip_prefix('=')?.trim().to_ascii_lowercase();
        let is_digest = !digest.is_empty() && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
        let algorithm = algorithm.trim().to_ascii_uppercase();
        is_digest.then(|| FileDigest { file: file.to_string(), algorithm, digest })
    }
}

fn algorithm_of(name: &str) -> Option<MessageDigest> {
    Some(match name {
        "SHA1" => MessageDigest::sha1(),
        "SHA256" => MessageDigest::sha256(),
        "SHA384" => MessageDigest::sha384(),
        "SHA512" => MessageDigest::sha512(),
        _ => return None,
    })
}

/// The digest of the contents of a member, as hexadecimal digits.
async fn digest_of(
    device: &Arc<dyn Device>,
    member: &ArchiveMember,
    kind: MessageDigest,
) -> Result<String> {
    let failed = |_| Error::new(Kind::Unsupported, "OpenSSL does not compute this digest");
    let mut hasher = Hasher::new(kind).map_err(failed)?;
    let mut done = 0;
    while done < member.len {
        let len = PART.min(member.len - done);
        // The end of a member is within the device.
        let part = crate::storage::read(device, member.offset + done, len).await?;
        hasher.update(&part).map_err(failed)?;
        done += len;
    }
    let bytes = hasher.finish().map_err(failed)?;
    Ok(bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a text cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_manifests_are_digests_of_files() {
        let text = "SHA256(vm.ovf)= 0AfF\r\n\nSHA1 (disk (1).vmdk) = 12\n";
        let manifest = OvaManifest::parse("vm.mf", text).unwrap();
        let found = manifest.files.iter().map(|one| (&*one.algorithm, &*one.file, &*one.digest));
        let expected = [("SHA256", "vm.ovf", "0aff"), ("SHA1", "disk (1).vmdk", "12")];
        assert_eq!(found.collect::<Vec<_>>(), expected);
        for wrong in ["SHA1 vm.ovf 12", "SHA1(vm.ovf)=", "SHA1(vm.ovf)= xy", "SHA1(vm.ovf) 12", "x"]
        {
            let why = OvaManifest::parse("vm.mf", wrong).err().unwrap();
            assert_eq!(why, "the manifest \"vm.mf\" has a line that is no digest", "{wrong}");
        }
    }
}
