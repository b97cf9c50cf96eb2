mod golden;
mod oracle;
