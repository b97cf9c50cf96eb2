//! Deployments of real `serve` processes, as clients see them; and the golden tests of the model.

mod api;
mod cancel;
mod cases;
mod cuda;
mod fault_table;
mod faults;
mod first_token;
mod frontend;
mod frontend_events;
mod frontend_faults;
mod frontend_pairs;
mod golden;
mod gpu_check;
mod kv_events;
mod misfits;
mod one_core;
mod openai_client;
mod oracle;
mod pd_cases;
mod pressure;
mod proxy;
mod same_text;
mod shutdown;
mod start;
mod status_page;
mod transports;
