//! Errors of object stores.

use std::error::Error as StdError;

use blockhaul_block::{Error, Kind};
use blockhaul_wire::printable;
use object_store::client::HttpError;

use crate::failure::{Failure, chain};
use crate::response::changed;
use crate::store_service::{AbsentCredentials, ResponseTimeout, ServiceRefusal};

/// Bytes of the text of a service that are shown.
const TEXT_MAX: usize = 300;

/// The remedy of a request to the wrong region, without its name.
const REGION: &str = "name the region of the bucket: region=";

/// The service that an object is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreKind {
    S3,
    Gcs,
    Azure,
}

impl StoreKind {
    /// The kind of `s3:`, `gs:` or `az:`.
    pub(crate) fn of_scheme(scheme: &str) -> Option<StoreKind> {
        match scheme {
            "s3" => Some(StoreKind::S3),
            "gs" => Some(StoreKind::Gcs),
            "az" => Some(StoreKind::Azure),
            _ => None,
        }
    }

    /// How to give credentials.
    fn credentials(self) -> &'static str {
        match self {
            StoreKind::S3 => {
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write a profile (aws configure); \
                 anonymous=on reads public objects"
            }
            StoreKind::Gcs => {
                "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS=FILE; \
                 anonymous=on reads public objects"
            }
            StoreKind::Azure => {
                "set AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN; anonymous=on reads \
                 public objects"
            }
        }
    }
}

/// A failed operation of an object store. The library has repeated those that may pass.
pub(crate) fn failure(kind: StoreKind, error: &object_store::Error) -> Failure {
    let causes = || std::iter::successors(error.source(), |cause| (*cause).source());
    if causes().any(|cause| cause.is::<AbsentCredentials>()) {
        let error = Error::new(Kind::Refused, "no credentials");
        return Failure::last(error.with_remedy(kind.credentials()));
    }
    if causes().any(|cause| cause.is::<ResponseTimeout>()) {
        return Failure::last(Error::new(Kind::TimedOut, ResponseTimeout.to_string()));
    }
    if let Some(refused) = causes().find_map(|cause| cause.downcast_ref::<ServiceRefusal>()) {
        return Failure::last(refusal(kind, refused));
    }
    if let Some(error) = causes().find_map(|cause| cause.downcast_ref::<HttpError>()) {
        return transport(error);
    }
    if matches!(error, object_store::Error::NotFound { .. }) {
        let error = Error::new(Kind::NotFound, "there is no such object");
        return Failure::last(error.with_remedy("check the names of the bucket and the object"));
    }
    let text = printable(chain(error).as_bytes(), 2 * TEXT_MAX);
    let remedy = "try again later, and look into the log of the service";
    Failure::last(Error::new(Kind::Io, text).with_remedy(remedy))
}

/// Whether a write was refused because the object has another version than it was written for.
pub(crate) fn is_conflict(error: &object_store::Error) -> bool {
    use object_store::Error::{AlreadyExists, Precondition};
    let refused = std::iter::successors(error.source(), |cause| (*cause).source())
        .find_map(|cause| cause.downcast_ref::<ServiceRefusal>());
    match refused {
        // An object that was removed meanwhile has another version, too.
        Some(refused) => {
            matches!(refused.status, 409 | 412)
                || refused.status == 404 && !is_no_bucket(&refused.code)
        }
        None => matches!(error, AlreadyExists { .. } | Precondition { .. }),
    }
}

fn is_no_bucket(code: &str) -> bool {
    matches!(code, "NoSuchBucket" | "ContainerNotFound")
}

/// The error of a response that is no success.
fn refusal(kind: StoreKind, refused: &ServiceRefusal) -> Error {
    if refused.status == 412 {
        return changed();
    }
    let (meaning, remedy) = meaning(kind, refused.status, &refused.code);
    let error = Error::new(meaning, refused.to_string())
        .because(RefusalCode { status: refused.status, code: refused.code.clone() });
    match &refused.region {
        Some(region) if remedy == REGION => {
            error.with_remedy(format!("{remedy}{}", printable(region.as_bytes(), 40)))
        }
        _ if remedy == REGION => error.with_remedy(format!("{remedy}NAME")),
        _ => error.with_remedy(remedy),
    }
}

/// The cause of an error: the word of the service.
#[derive(Debug)]
struct RefusalCode {
    status: u16,
    code: String,
}

impl std::fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let code = printable(self.code.as_bytes(), TEXT_MAX);
        write!(f, "{}", format!("{} {code}", self.status).trim_end())
    }
}

impl StdError for RefusalCode {}

impl RefusalCode {
    fn of(error: &Error) -> Option<&RefusalCode> {
        error.source()?.downcast_ref()
    }
}

/// Whether an error says that the bucket does not exist.
pub(crate) fn is_bucket_missing(error: &Error) -> bool {
    RefusalCode::of(error).is_some_and(|cause| is_no_bucket(&cause.code))
}

/// Whether an error says that the object must not be read.
pub(crate) fn is_forbidden(error: &Error) -> bool {
    let is_code = |code: &str| matches!(code, "AccessDenied" | "AuthorizationPermissionMismatch");
    RefusalCode::of(error).is_some_and(|cause| cause.status == 403 && is_code(&cause.code))
}

fn meaning(kind: StoreKind, status: u16, code: &str) -> (Kind, &'static str) {
    match (code, status) {
        ("NoSuchBucket" | "ContainerNotFound", _) => {
            (Kind::NotFound, "check the name of the bucket")
        }
        ("NoSuchUpload" | "InvalidPart" | "InvalidBlockList", _) => (
            Kind::NotFound,
            "the upload was completed or given up by others: copy again, with --restart if there is a journal",
        ),
        ("RequestTimeTooSkewed" | "RequestExpired", _) => {
            (Kind::Refused, "set the clock of this machine")
        }
        ("ExpiredToken" | "TokenRefreshRequired" | "InvalidToken", _) => {
            (Kind::Refused, "log in again: the session has ended")
        }
        (
            "AuthorizationHeaderMalformed"
            | "PermanentRedirect"
            | "IllegalLocationConstraintException",
            _,
        )
        | (_, 301) => (Kind::Refused, REGION),
        ("QuotaExceeded" | "AccountBeingCreated" | "InsufficientStorage", _) | (_, 507) => {
            (Kind::NoSpace, "free space in the service, or raise its quota")
        }
        (_, 416) => (Kind::Io, "the object is shorter than it should be: restore it"),
        (_, 404) => (Kind::NotFound, "check the names of the bucket and the object"),
        (_, 401) => (Kind::Refused, kind.credentials()),
        (_, 403) => (Kind::Refused, "check the credentials and the permissions of the bucket"),
        (_, 400) => (Kind::Refused, "check the credentials, the region and the endpoint"),
        (_, 408 | 429 | 500 | 502..=504 | 506..=599) => {
            (Kind::Io, "try again later, or use fewer connections (connections=N)")
        }
        _ => (Kind::Unsupported, "check the endpoint: endpoint=URL"),
    }
}

/// The error of a connection.
fn transport(error: &HttpError) -> Failure {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<reqwest::Error>() {
            return Failure {
                next: crate::failure::NextStep::GiveUp,
                ..Failure::of_connection(error)
            };
        }
        cause = error.source();
    }
    Failure::last(Error::new(Kind::Disconnected, chain(error)))
}
