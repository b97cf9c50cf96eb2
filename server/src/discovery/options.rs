//! The flags of discovery, and the backend that they name.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::etcd::EtcdDiscovery;
use super::file::FileDiscovery;
use super::kubernetes::{KubernetesDiscovery, ROLE_LABEL};
use super::{Discovery, DiscoveryError, is_worker_id};
use crate::args::positive_secs;
use crate::config::{ConfigError, bad};

const DISCOVERY: &str = "Discovery";

/// How workers and frontends find each other.
#[derive(Clone, Debug, Args)]
pub struct DiscoveryArgs {
    /// Where workers register and frontends look for them: a folder that all can reach, etcd, Kubernetes'
    /// EndpointSlices, or nowhere (static). `file` when not given; a frontend that is given workers looks for no others.
    #[arg(long, env = "KVFERRY_DISCOVERY_BACKEND", value_enum, help_heading = DISCOVERY)]
    pub discovery_backend: Option<Backend>,
    /// The folder; kvferry-<user id> in the folder for temporary files when not given.
    #[arg(long, env = "KVFERRY_FILE_KV", value_name = "DIR", help_heading = DISCOVERY)]
    pub discovery_dir: Option<PathBuf>,
    /// A worker that is not heard of for this long is gone.
    #[arg(long, value_name = "SECS", default_value_t = 10.0, value_parser = positive_secs, help_heading = DISCOVERY)]
    pub discovery_lease_secs: f64,
    /// Keeps deployments apart that use the same folder or etcd.
    #[arg(long, env = "KVFERRY_NAMESPACE", value_name = "NAME", default_value = "default", help_heading = DISCOVERY)]
    pub namespace: String,
    /// Members of the etcd cluster.
    #[arg(long, env = "ETCD_ENDPOINTS", value_name = "URL", value_delimiter = ',', help_heading = DISCOVERY)]
    #[arg(default_value = "http://127.0.0.1:2379")]
    pub etcd_endpoints: Vec<String>,
    /// Kubernetes' API server, one that asks for no credentials such as `kubectl proxy`; that of the kubeconfig (KUBECONFIG,
    /// ~/.kube/config), or the pod's own, when not given.
    #[arg(long, value_name = "URL", help_heading = DISCOVERY)]
    pub kubernetes_api: Option<String>,
    /// The namespace of the workers' Services; the kubeconfig's or the pod's own when not given, `default` with --kubernetes-api.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME", help_heading = DISCOVERY)]
    pub kubernetes_namespace: Option<String>,
    /// Which EndpointSlices are workers, by label.
    #[arg(long, value_name = "LABELS", default_value = ROLE_LABEL, help_heading = DISCOVERY)]
    pub selector: String,
}

/// Where workers are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    File,
    Etcd,
    Kubernetes,
    /// Only those that flags name.
    Static,
}

/// The checked flags; not `static`.
#[derive(Clone, Debug)]
pub struct DiscoveryOptions {
    args: DiscoveryArgs,
    backend: Backend,
    /// Somebody asked for it, so that it must work.
    pub explicit: bool,
    /// `--discovery-backend` was given: a frontend looks for workers beside those it was given.
    pub named: bool,
}

impl DiscoveryOptions {
    /// `None` for `static`. Errors: a value that cannot be used.
    pub fn from_args(args: &DiscoveryArgs) -> Result<Option<Self>, ConfigError> {
        if !is_worker_id(&args.namespace) {
            return Err(bad("namespace", &args.namespace, "letters, digits, '.', '_' and '-'".into()));
        }
        let urls = args.etcd_endpoints.iter().map(|url| ("etcd-endpoints", url));
        for (flag, url) in urls.chain(args.kubernetes_api.iter().map(|url| ("kubernetes-api", url))) {
            if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
                return Err(bad(flag, url, "a URL such as http://127.0.0.1:2379".into()));
            }
        }
        let explicit = args.discovery_backend.is_some() || args.discovery_dir.is_some();
        let named = args.discovery_backend.is_some();
        let backend = args.discovery_backend.unwrap_or(Backend::File);
        Ok((backend != Backend::Static).then(|| Self { args: args.clone(), backend, explicit, named }))
    }

    /// Opens the backend. Errors: a value that cannot be used.
    pub fn open(&self) -> Result<Arc<dyn Discovery>, DiscoveryError> {
        let lease = Duration::from_secs_f64(self.args.discovery_lease_secs);
        Ok(match self.backend {
            Backend::Static | Backend::File => Arc::new(FileDiscovery::new(self.dir(), lease)),
            Backend::Etcd => {
                let endpoints = self.args.etcd_endpoints.clone();
                Arc::new(EtcdDiscovery::new(reqwest::Client::new(), endpoints, &self.args.namespace, lease))
            }
            Backend::Kubernetes => Arc::new(self.kubernetes()?),
        })
    }

    fn dir(&self) -> PathBuf {
        let default = || {
            let user = std::fs::metadata("/proc/self").map(|process| process.uid().to_string());
            std::env::temp_dir().join(format!("kvferry-{}", user.unwrap_or_else(|_| "any".into())))
        };
        self.args.discovery_dir.clone().unwrap_or_else(default).join(&self.args.namespace)
    }

    fn kubernetes(&self) -> Result<KubernetesDiscovery, DiscoveryError> {
        let server = |url: &String| match url.parse() {
            Ok(url) => Ok(kube::Config::new(url)),
            Err(error) => Err(DiscoveryError::Backend {
                backend: "kubernetes",
                what: format!("--kubernetes-api is {url:?}"),
                reason: format!("{error}, expected a URL"),
            }),
        };
        let server = self.args.kubernetes_api.as_ref().map(server).transpose()?;
        let (namespace, selector) = (self.args.kubernetes_namespace.clone(), self.args.selector.clone());
        Ok(KubernetesDiscovery::new(server, namespace, selector))
    }
}
