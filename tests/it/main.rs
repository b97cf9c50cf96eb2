
mod golden;
mod oracle;
