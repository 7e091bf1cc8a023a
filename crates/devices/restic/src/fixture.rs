//! Repositories for tests.

use std::fs;
use std::path::{Path, PathBuf};

use openssl::base64::encode_block;
use openssl::pkcs5::scrypt;
use serde_json::{Value, json};

use crate::cipher::CipherKey;
use crate::digest::Digest;
use crate::fault::pack_file;
use crate::test_support::files_below;

/// The password of all repositories.
pub(crate) const PASSWORD: &str = "a password";

/// Pseudo-random numbers.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// A repository that is made.
pub(crate) struct TestRepository {
    dir: tempfile::TempDir,
    key: CipherKey,
    version: u32,
}

impl TestRepository {
    pub(crate) fn new(version: u32) -> TestRepository {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let key = CipherKey { encrypt: [7; 32], mac_k: [8; 16], mac_r: [9; 16] };
        let mut repository = TestRepository { dir, key, version };
        repository.add_key(PASSWORD);
        let config = json!({ "version": version, "id": "x", "chunker_polynomial": "y" });
        let sealed = repository.seal(config.to_string().as_bytes());
        repository.write("config", &sealed);
        repository
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The files, in order.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        files_below(self.path())
    }

    fn seal(&self, text: &[u8]) -> Vec<u8> {
        self.key.seal(text).unwrap()
    }

    pub(crate) fn write(&self, file: &str, bytes: &[u8]) {
        let path = self.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(crate) fn add_key(&mut self, password: &str) {
        let (salt, mut derived) = ([5; 32], [0; 64]);
        scrypt(password.as_bytes(), &salt, 2, 8, 1, 1 << 20, &mut derived).unwrap();
        let master = json!({
            "mac": { "k": encode_block(&self.key.mac_k), "r": encode_block(&self.key.mac_r) },
            "encrypt": encode_block(&self.key.encrypt),
        });
        let data = CipherKey::from_bytes(&derived).seal(master.to_string().as_bytes()).unwrap();
        let file = json!({
            "kdf": "scrypt", "N": 2, "r": 8, "p": 1,
            "salt": encode_block(&salt), "data": encode_block(&data),
        });
        let text = file.to_string();
        self.write(&format!("keys/{}", Digest::of(text.as_bytes())), text.as_bytes());
    }

    /// Writes a file whose name is its digest.
    pub(crate) fn add_file(&mut self, folder: &str, text: &Value) -> Digest {
        let text = text.to_string().into_bytes();
        let text = if self.version == 2 { [&[2], &pack(&text)[..]].concat() } else { text };
        let sealed = self.seal(&text);
        let name = Digest::of(&sealed);
        self.write(&format!("{folder}/{name}"), &sealed);
        name
    }

    /// Writes a pack, and returns what an index says of it.
    pub(crate) fn add_pack(&mut self, kind: &str, blobs: &[Vec<u8>]) -> Value {
        let (mut bytes, mut entries) = (Vec::new(), Vec::new());
        for (number, blob) in blobs.iter().enumerate() {
            let packed = (self.version == 2 && number % 3 != 2).then(|| pack(blob));
            let sealed = self.seal(packed.as_deref().unwrap_or(blob));
            let mut entry = json!({
                "id": Digest::of(blob).to_string(), "type": kind,
                "offset": bytes.len(), "length": sealed.len(),
            });
            if packed.is_some() {
                entry["uncompressed_length"] = blob.len().into();
            }
            entries.push(entry);
            bytes.extend_from_slice(&sealed);
        }
        bytes.extend_from_slice(b"a header");
        let name = Digest::of(&bytes).to_string();
        self.write(&pack_file(&name), &bytes);
        json!({ "id": name, "blobs": entries })
    }

    /// Writes a tree, and returns its name and what an index says of its pack.
    pub(crate) fn add_tree(&mut self, nodes: Value) -> (Digest, Value) {
        let text = json!({ "nodes": nodes }).to_string().into_bytes();
        (Digest::of(&text), self.add_pack("tree", &[text]))
    }

    pub(crate) fn add_snapshot(
        &mut self,
        tree: Digest,
        time: &str,
        host: &str,
        tags: &[&str],
    ) -> Digest {
        let snapshot =
            json!({ "time": time, "tree": tree.to_string(), "hostname": host, "tags": tags });
        self.add_file("snapshots", &snapshot)
    }

    /// Writes a snapshot with one file, `/disk`, in several packs and index files. Returns its identifier.
    pub(crate) fn add_disk(&mut self, chunks: &[Vec<u8>], numbers: &mut Numbers) -> Digest {
        let mut once = chunks.to_vec();
        once.sort();
        once.dedup();
        let mut packs = Vec::new();
        while !once.is_empty() {
            let some = once.split_off(once.len().saturating_sub(1 + numbers.below(5)));
            packs.push(self.add_pack("data", &some));
        }
        let content: Vec<_> = chunks.iter().map(|chunk| Digest::of(chunk).to_string()).collect();
        let size: usize = chunks.iter().map(Vec::len).sum();
        let (tree, pack) = self.add_tree(json!([
            { "name": "a", "type": "dir", "subtree": Digest::of(b"x").to_string() },
            { "name": "disk", "type": "file", "size": size, "content": content },
        ]));
        packs.push(pack);
        let others = packs.split_off(packs.len() / 2);
        self.add_file("index", &json!({ "packs": packs }));
        self.add_file("index", &json!({ "packs": others }));
        self.add_snapshot(tree, "2026-01-02T03:04:05.678+01:00", "h", &["t"])
    }
}

fn pack(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).unwrap()
}

/// The parts of a disk: bytes that compress or not, repetitions and zeroes.
pub(crate) fn chunks(numbers: &mut Numbers, most: usize) -> Vec<Vec<u8>> {
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    for _ in 0..1 + numbers.below(most) {
        let len = 1 + numbers.below(3000);
        let chunk = match numbers.below(4) {
            0 => vec![0; len],
            1 => vec![7; len],
            2 if !chunks.is_empty() => chunks[numbers.below(chunks.len())].clone(),
            _ => numbers.bytes(len),
        };
        chunks.push(chunk);
    }
    chunks
}
