//! The lease of a blob: the right of one program to write it, which it renews.
//!
//! Each write names the lease by its identifier. Where it is not known whether a write was carried out, the identifier is
//! changed before the write is repeated: a late first attempt is refused, and cannot overwrite what is written later.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use http::Method;

use super::requests::{BlobCall, BlobRequests, CallFailure};
use crate::failure::Repetitions;

/// Time for which the service grants the lease, and time between renewals.
const TIME: Duration = Duration::from_secs(30);
const RENEWAL: Duration = Duration::from_secs(10);
/// Time after which the lease of a program that was killed has ended, and time between attempts to get it.
const WAIT_MAX: Duration = Duration::from_secs(35);
const WAIT: Duration = Duration::from_secs(1);

/// The lease of a blob that is open for writing.
pub(super) struct BlobLease {
    requests: Arc<BlobRequests>,
    id: Mutex<LeaseId>,
    /// One request about the lease at a time.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
enum LeaseId {
    None,
    Own(String),
    /// Another program has the lease, or has broken it.
    Lost,
}

impl BlobLease {
    /// The lease of the blob of these requests, which is not there yet.
    pub(super) fn new(requests: Arc<BlobRequests>) -> Arc<BlobLease> {
        let id = Mutex::new(LeaseId::None);
        Arc::new(BlobLease { requests, id, turn: tokio::sync::Mutex::default() })
    }

    /// The identifier for a write.
    ///
    /// # Errors
    /// [`Kind::InUse`] if the lease is lost.
    pub(super) fn id(&self) -> Result<String> {
        let id = self.id.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match id {
            LeaseId::Own(id) => Ok(id),
            LeaseId::None | LeaseId::Lost => {
                let text = "another program has taken the lease of the blob";
                Err(Error::new(Kind::InUse, text)
                    .with_remedy("end it there, and open the blob again"))
            }
        }
    }

    fn set(&self, id: LeaseId) {
        *self.id.lock().unwrap_or_else(PoisonError::into_inner) = id;
    }

    async fn request(
        &self,
        action: &str,
        fields: Vec<(&'static str, String)>,
    ) -> Result<(), CallFailure> {
        let fields = [vec![("lease-action", action.to_owned())], fields].concat();
        let call =
            BlobCall { method: Method::PUT, component: "lease", fields, ..BlobCall::default() };
        self.requests.send(call).await.map(drop)
    }

    /// Gets the lease, waits for the end of that of a program that was killed, and renews it as long as it is used.
    ///
    /// # Errors
    /// [`Kind::InUse`] if another program has it; and those of requests.
    pub(super) async fn acquire(self: &Arc<BlobLease>) -> Result<()> {
        let id = new_id()?;
        let due = blockhaul_io::now() + WAIT_MAX;
        let mut repetitions = Repetitions::opening();
        loop {
            let fields = vec![
                ("lease-duration", TIME.as_secs().to_string()),
                ("proposed-lease-id", id.clone()),
            ];
            match self.request("acquire", fields).await {
                Ok(()) => break,
                Err(failed) if failed.is("LeaseAlreadyPresent") => {
                    if blockhaul_io::now() >= due {
                        return Err(in_use());
                    }
                    log::debug!("another program has the lease of the blob; trying again");
                    tokio::time::sleep(WAIT).await;
                }
                Err(failed) => repetitions.wait(failed.failure, 0).await?,
            }
        }
        self.set(LeaseId::Own(id));
        tokio::spawn(keep(Arc::downgrade(self)));
        Ok(())
    }

    async fn renew(&self) -> Result<()> {
        let _turn = self.turn.lock().await;
        let Ok(id) = self.id() else { return Ok(()) };
        match self.request("renew", vec![("lease-id", id)]).await {
            Ok(()) => Ok(()),
            Err(failed) => {
                if failed.is_of_lease() {
                    self.set(LeaseId::Lost);
                }
                Err(failed.failure.error)
            }
        }
    }

    /// Decides about a write with the identifier `used` that was refused because of the lease: it is repeated if the
    /// identifier is another one by now, or if a lease that had expired can be renewed.
    ///
    /// # Errors
    /// [`Kind::InUse`] if the lease is lost.
    pub(super) async fn check(&self, used: &str) -> Result<()> {
        if self.id()? == used {
            // It says whether the lease is lost.
            let _ = self.renew().await;
        }
        self.id().map(drop)
    }

    /// Changes the identifier, unless that was done since `used` was the identifier. Requests with earlier ones are refused
    /// from then on.
    ///
    /// # Errors
    /// [`Kind::InUse`] if the lease is lost; and those of requests.
    pub(super) async fn change(&self, used: &str) -> Result<()> {
        let _turn = self.turn.lock().await;
        let old = self.id()?;
        if old != used {
            return Ok(());
        }
        let new = new_id()?;
        let mut repetitions = Repetitions::new();
        loop {
            let fields = vec![("lease-id", old.clone()), ("proposed-lease-id", new.clone())];
            let failed = match self.request("change", fields).await {
                Ok(()) => break,
                Err(failed) => failed,
            };
            if failed.is_of_lease() {
                // An attempt before this one may have changed it.
                match self.request("renew", vec![("lease-id", new.clone())]).await {
                    Ok(()) => break,
                    Err(failed) if failed.is_of_lease() => {
                        self.set(LeaseId::Lost);
                        return self.id().map(drop);
                    }
                    Err(failed) => repetitions.wait(failed.failure, 0).await?,
                }
            } else {
                repetitions.wait(failed.failure, 0).await?;
            }
        }
        self.set(LeaseId::Own(new));
        Ok(())
    }

    /// Gives the lease up.
    pub(super) async fn release(&self) {
        let _turn = self.turn.lock().await;
        let Ok(id) = self.id() else { return };
        self.set(LeaseId::None);
        if let Err(failed) = self.request("release", vec![("lease-id", id)]).await {
            log::debug!("the lease ends by itself: {}", failed.failure.error);
        }
    }
}

async fn keep(lease: Weak<BlobLease>) {
    loop {
        tokio::time::sleep(RENEWAL).await;
        let Some(lease) = lease.upgrade() else { return };
        if lease.id().is_err() {
            return;
        }
        if let Err(error) = lease.renew().await {
            log::warn!("cannot renew the lease of a blob: {error}");
        }
    }
}

/// The error of a blob that another program writes.
pub(super) fn in_use() -> Error {
    let error = Error::new(Kind::InUse, "another program has the lease of the blob");
    error.with_remedy("close the blob there (an attached disk: detach it), or break the lease: az storage blob lease break")
}

/// A new identifier, a UUID.
fn new_id() -> Result<String> {
    let mut bytes = [0; 16];
    openssl::rand::rand_bytes(&mut bytes)
        .map_err(|error| Error::new(Kind::Io, "no random numbers").because(error))?;
    // RFC 9562, version 4.
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    Ok(parts.join("-"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_random_uuids() {
        let [one, other] = [new_id().unwrap(), new_id().unwrap()];
        assert_ne!(one, other);
        assert!(one.len() == 36 && one.as_bytes()[14] == b'4', "{one}");
        assert!(b"89ab".contains(&one.as_bytes()[19]), "{one}");
    }
}
