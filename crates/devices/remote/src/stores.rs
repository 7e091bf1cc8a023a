//! Stores of the vendors, with credentials as the vendors' tools take them.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{BackoffConfig, RetryConfig, StaticCredentialProvider};

use crate::aws_profile::AwsProfile;
use crate::crypto::OpenSslCrypto;
use crate::failure::{PAUSE, REPEATS_MAX};
use crate::page_blob::requests::AzureAccount;
use crate::response::PAUSE_MAX;
use crate::store_failure::{StoreKind, failure};
use crate::store_object::WritableStore;
use crate::store_service::StoreService;

/// Settings of a store from its description.
#[derive(Debug, Default)]
pub(crate) struct StoreSettings {
    pub(crate) bucket: String,
    pub(crate) endpoint: Option<String>,
    pub(crate) region: Option<String>,
    pub(crate) profile: Option<String>,
    pub(crate) account: Option<String>,
    pub(crate) is_path_style: bool,
    pub(crate) is_anonymous: bool,
}

/// A bucket of a service.
pub(crate) struct StoreBucket {
    pub(crate) store: Arc<dyn WritableStore>,
    /// URL of the service, or its scheme if it is the vendor's own, with the bucket.
    pub(crate) address: Arc<str>,
    /// The account of a bucket of Azure.
    pub(crate) account: Option<AzureAccount>,
}

impl StoreBucket {
    fn new<T: WritableStore>(
        kind: StoreKind,
        built: object_store::Result<T>,
        address: String,
    ) -> Result<StoreBucket> {
        match built {
            Ok(store) => {
                let (store, address) = (Arc::new(store), address.into());
                Ok(StoreBucket { store, address, account: None })
            }
            Err(error) => Err(failure(kind, &error).error.with_kind(Kind::Invalid)),
        }
    }
}

/// The address of a bucket at a service with this URL; in one spelling, where the URL has several.
fn address(endpoint: Option<&str>, vendor: &str, bucket: &str) -> String {
    let endpoint = endpoint.filter(|endpoint| !endpoint.is_empty()).unwrap_or(vendor);
    let url = reqwest::Url::parse(endpoint).map(String::from);
    let url = url.unwrap_or_else(|_| endpoint.to_owned());
    format!("{}/{bucket}", url.trim_end_matches('/'))
}

/// A bucket with these settings. Reads files and the environment: it blocks.
///
/// # Errors
/// Settings or credentials are missing or wrong.
pub(crate) fn build(
    kind: StoreKind,
    settings: &StoreSettings,
    service: StoreService,
) -> Result<StoreBucket> {
    match kind {
        StoreKind::S3 => s3(settings, service),
        StoreKind::Gcs => gcs(settings, service),
        StoreKind::Azure => azure(settings, service),
    }
}

fn retries() -> RetryConfig {
    let backoff = BackoffConfig { init_backoff: PAUSE, max_backoff: PAUSE_MAX, base: 2.0 };
    RetryConfig { backoff, max_retries: REPEATS_MAX as usize, retry_timeout: 3 * PAUSE_MAX }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn s3(settings: &StoreSettings, service: StoreService) -> Result<StoreBucket> {
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&settings.bucket)
        .with_skip_signature(settings.is_anonymous)
        .with_crypto_provider(Arc::new(OpenSslCrypto))
        .with_http_connector(service)
        .with_retry(retries());
    if !settings.is_anonymous {
        builder = with_profile(builder, settings)?;
    }
    if let Some(region) = &settings.region {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = &settings.endpoint {
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let endpoint = endpoint.iter().find_map(|key| builder.get_config_value(key));
    let address = address(endpoint.as_deref(), "s3:", &settings.bucket);
    if !settings.is_path_style {
        builder = in_host(builder, &settings.bucket)?;
    }
    StoreBucket::new(StoreKind::S3, builder.build(), address)
}

/// With the settings of a profile that the environment does not have.
fn with_profile(mut builder: AmazonS3Builder, settings: &StoreSettings) -> Result<AmazonS3Builder> {
    let typed = settings.profile.clone();
    let is_chosen = typed.is_some();
    let name = typed.or_else(|| variable("AWS_PROFILE")).unwrap_or_else(|| "default".to_owned());
    let profile = AwsProfile::read(&name)?;
    if profile.is_empty() && is_chosen {
        let text = format!("no profile {name} in ~/.aws/credentials and ~/.aws/config");
        return Err(
            Error::new(Kind::NotFound, text).with_remedy("list them: aws configure list-profiles")
        );
    }
    for (key, name, is_credential) in [
        (AmazonS3ConfigKey::AccessKeyId, "aws_access_key_id", true),
        (AmazonS3ConfigKey::SecretAccessKey, "aws_secret_access_key", true),
        (AmazonS3ConfigKey::Token, "aws_session_token", true),
        (AmazonS3ConfigKey::Region, "region", false),
        (AmazonS3ConfigKey::Endpoint, "endpoint_url", false),
    ] {
        // Credentials are taken from one place: a token belongs to its key.
        let is_known = if is_credential {
            variable("AWS_ACCESS_KEY_ID").is_some()
        } else {
            builder.get_config_value(&key).is_some()
        };
        if let Some(value) = profile.setting(name).filter(|_| is_chosen || !is_known) {
            builder = builder.with_config(key, value);
        }
    }
    if builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).is_none() {
        profile.check(&name)?;
    }
    Ok(builder)
}

/// With the bucket in the host of URLs.
fn in_host(builder: AmazonS3Builder, bucket: &str) -> Result<AmazonS3Builder> {
    let builder = builder.with_virtual_hosted_style_request(true);
    for key in [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint] {
        let Some(endpoint) = builder.get_config_value(&key) else { continue };
        let Some((scheme, host)) = endpoint.split_once("://") else { continue };
        return Ok(builder.with_config(key, format!("{scheme}://{bucket}.{host}")));
    }
    Ok(builder)
}

fn gcs(settings: &StoreSettings, service: StoreService) -> Result<StoreBucket> {
    let emulator = variable("STORAGE_EMULATOR_HOST");
    let emulator =
        emulator.map(|host| if host.contains("://") { host } else { format!("http://{host}") });
    let is_anonymous = settings.is_anonymous || emulator.is_some();
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&settings.bucket)
        .with_skip_signature(is_anonymous)
        .with_crypto_provider(Arc::new(OpenSslCrypto))
        .with_http_connector(service)
        .with_retry(retries());
    if is_anonymous {
        // Writes ask for a token even so.
        let token = GcpCredential { bearer: String::new() };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(token)));
    }
    let endpoint = settings.endpoint.clone().or(emulator);
    if let Some(endpoint) = &endpoint {
        builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint.trim_end_matches('/'));
    }
    let address = address(endpoint.as_deref(), "gs:", &settings.bucket);
    StoreBucket::new(StoreKind::Gcs, builder.build(), address)
}

fn azure(settings: &StoreSettings, service: StoreService) -> Result<StoreBucket> {
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(&settings.bucket)
        .with_skip_signature(settings.is_anonymous)
        .with_crypto_provider(Arc::new(OpenSslCrypto))
        .with_http_connector(service.clone())
        .with_retry(retries());
    let connection = variable("AZURE_STORAGE_CONNECTION_STRING").unwrap_or_default();
    let part = |name: &str| {
        let parts = connection.split(';').filter_map(|part| part.split_once('='));
        parts.filter(|(key, _)| *key == name).map(|(_, value)| value.to_owned()).next()
    };
    let first = |typed: Option<String>, names: &[&str], key: &str| {
        typed.or_else(|| names.iter().find_map(|name| variable(name))).or_else(|| part(key))
    };
    for (key, value) in [
        (
            AzureConfigKey::AccountName,
            first(settings.account.clone(), &["AZURE_STORAGE_ACCOUNT"], "AccountName"),
        ),
        (AzureConfigKey::AccessKey, first(None, &["AZURE_STORAGE_KEY"], "AccountKey")),
        (AzureConfigKey::SasKey, first(None, &[], "SharedAccessSignature")),
        (AzureConfigKey::Endpoint, first(settings.endpoint.clone(), &[], "BlobEndpoint")),
    ] {
        if let Some(value) = value {
            builder = builder.with_config(key, value);
        }
    }
    let Some(name) = builder.get_config_value(&AzureConfigKey::AccountName) else {
        let text = "no storage account";
        let remedy = "name it with account=NAME or in AZURE_STORAGE_ACCOUNT";
        return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
    };
    let vendor = format!("https://{name}.blob.core.windows.net");
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    let address = address(endpoint.as_deref(), &vendor, &settings.bucket);
    let built = builder.build();
    let credentials = built.as_ref().ok().map(|store| store.credentials().clone());
    let credentials = credentials.filter(|_| !settings.is_anonymous);
    let account = AzureAccount { name, service, credentials };
    let bucket = StoreBucket::new(StoreKind::Azure, built, address)?;
    Ok(StoreBucket { account: Some(account), ..bucket })
}
