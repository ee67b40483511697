"""When transfers outside of chunked loops are issued and waited for."""
