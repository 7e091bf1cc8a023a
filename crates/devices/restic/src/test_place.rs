//! Repositories with a key that costs no time, and copies to any storage, for tests.

use std::sync::Arc;

use blockhaul_block::{Device as _, Error, Request};
use openssl::base64::encode_block;
use openssl::pkcs5::scrypt;
use serde_json::json;

use crate::cipher::CipherKey;
use crate::digest::Digest;
use crate::fixture::PASSWORD;
use crate::index::BlobKind;
use crate::repository::{Repository, RepositoryReader};
use crate::snapshot::{self, SnapshotFilter};
use crate::storage::{CONFIG, RepositoryStorage};
use crate::test_support::{TestWrite, on_a_worker};
use crate::tree;
use crate::writer::person::Person;
use crate::writer::place::{BackupPlace, BackupRequest};
use crate::writer::plan::BackupPlan;
use crate::writer::polynomial;
use crate::writer::session::CompressionMode;

/// Makes a repository whose key is found at once.
pub(crate) fn make_repository(storage: &dyn RepositoryStorage) {
    storage.make().unwrap();
    let key = CipherKey::random().unwrap();
    let (salt, mut derived) = ([5; 64], [0; 64]);
    scrypt(PASSWORD.as_bytes(), &salt, 2, 8, 1, 1 << 20, &mut derived).unwrap();
    let master = json!({
        "mac": { "k": encode_block(&key.mac_k), "r": encode_block(&key.mac_r) },
        "encrypt": encode_block(&key.encrypt),
    });
    let data = CipherKey::from_bytes(&derived).seal(master.to_string().as_bytes()).unwrap();
    let file = json!({
        "created": jiff::Timestamp::now(), "username": "u", "hostname": "h", "kdf": "scrypt", "N": 2, "r": 8, "p": 1,
        "salt": encode_block(&salt), "data": encode_block(&data),
    });
    let file = file.to_string();
    storage.put(&format!("keys/{}", Digest::of(file.as_bytes())), file.as_bytes()).unwrap();
    let polynomial = format!("{:x}", polynomial::random().unwrap());
    let config = json!({ "version": 2, "id": Digest::of(b"id"), "chunker_polynomial": polynomial });
    let sealed = key.seal(config.to_string().as_bytes()).unwrap();
    assert!(storage.put_new(CONFIG, &sealed).unwrap());
}

/// A place with packs of this size.
pub(crate) fn place(storage: Arc<dyn RepositoryStorage>, pack_size: usize) -> BackupPlace {
    let request = BackupRequest {
        host: None,
        tags: Vec::new(),
        parent: None,
        compression: CompressionMode::Auto,
        init: true,
        pack_size,
    };
    BackupPlace { storage, password: PASSWORD.into(), request, person: Person::here() }
}

/// A copy of these writes to `#new/disk`: of a disk of this size, or of parts of the earlier backup.
pub(crate) fn copy_to(
    place: BackupPlace,
    size: Option<u64>,
    writes: &[TestWrite],
) -> Result<(), Error> {
    let plan = BackupPlan::check(place, "disk", size)?;
    let device = plan.device("disk");
    plan.begin(&device)?;
    let requests = writes.to_vec();
    on_a_worker(move || async move {
        for write in requests {
            device.submit(write.request()).await?;
        }
        device.submit(Request::flush()).await.map(drop)
    })
}

/// The identifiers of all snapshots, the oldest first, with the contents of the file `disk` in each: every blob is compared with its digest.
pub(crate) fn contents(storage: Arc<dyn RepositoryStorage>) -> Vec<(Digest, Vec<u8>)> {
    let reader = RepositoryReader::open(storage, PASSWORD.as_bytes()).unwrap();
    let snapshots = snapshot::all(&reader, &SnapshotFilter::default()).unwrap();
    let repository = Repository::load(reader).unwrap();
    let content = |tree: &Digest| {
        let node = tree::find(&repository, tree, "disk").unwrap();
        let blobs =
            node.content.iter().map(|blob| repository.blob(BlobKind::Data, blob).unwrap().1);
        blobs.collect::<Vec<_>>().concat()
    };
    snapshots.iter().map(|snapshot| (snapshot.id, content(&snapshot.tree))).collect()
}
